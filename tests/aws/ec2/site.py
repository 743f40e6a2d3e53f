"""Creates a small network in the cloud with boto3 only, and logs in to its machines with paramiko only."""

from __future__ import annotations

import base64
import io
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paramiko
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from tests.aws.ec2.cloud import Ec2Cloud
from tests.aws.ec2.server import DEBIAN_OWNER

BOOT_SECONDS = 300
ANYWHERE = [{"CidrIp": "0.0.0.0/0"}]


def eventually(what: str, seconds: float, attempt: Callable[[], Any]) -> Any:
    """Repeats an attempt until its result is true and returns the result. Network errors count as false."""
    deadline = time.monotonic() + seconds
    while True:
        value: Any = None
        try:
            value = attempt()
        except (OSError, EOFError, paramiko.SSHException) as error:
            failure: object = error
        else:
            failure = value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds} seconds; last: {failure!r}")
        time.sleep(0.3)


@dataclass
class Site:
    """Holds a VPC with an internet gateway, a subnet and two groups: for an environment and for the internet."""

    cloud: Ec2Cloud
    ec2: Any
    key: Ed25519PrivateKey
    vpc: str
    subnet: str
    route_table: str
    gateway: str
    environment_group: str
    internet_group: str

    def run(self, user_data: str, *, groups: list[str], public: bool, image: str = "", **more: Any) -> str:
        """Launches an instance and returns its id."""
        card = {
            "DeviceIndex": 0,
            "SubnetId": self.subnet,
            "Groups": groups,
            "AssociatePublicIpAddress": public,
        }
        launched = self.ec2.run_instances(
            ImageId=image or self.debian(),
            InstanceType="t3.micro",
            MinCount=1,
            MaxCount=1,
            KeyName="key",
            UserData=user_data,
            NetworkInterfaces=[card],
            **more,
        )
        return str(launched["Instances"][0]["InstanceId"])

    def debian(self) -> str:
        """Returns the newest official Debian 12 AMI, searched for as on EC2."""
        names = [{"Name": "name", "Values": ["debian-12-amd64-*"]}]
        images = self.ec2.describe_images(Owners=[DEBIAN_OWNER], Filters=names)["Images"]
        return str(max(images, key=lambda image: image["CreationDate"])["ImageId"])

    def describe(self, instance: str) -> dict[str, Any]:
        """Returns an instance as DescribeInstances describes it."""
        description: dict[str, Any] = self.ec2.describe_instances(InstanceIds=[instance])["Reservations"][0][
            "Instances"
        ][0]
        return description

    def state(self, instance: str) -> str:
        """Returns an instance's state."""
        return str(self.describe(instance)["State"]["Name"])

    def host_keys(self, instance: str) -> dict[str, str]:
        """Returns the host keys, by type, that the instance printed on its console at its first boot."""

        def read() -> dict[str, str]:
            output = self.ec2.get_console_output(InstanceId=instance).get("Output", "")
            text = output if "\n" in output else base64.b64decode(output).decode(errors="replace")
            keys = re.findall(r"BEGIN SSH HOST KEY KEYS-----(.*?)-----END", text.replace("\r", ""), re.DOTALL)
            return dict(re.findall(r"((?:ssh|ecdsa)-\S+) (\S+)", keys[-1])) if keys else {}

        keys: dict[str, str] = eventually(f"host keys of {instance}", BOOT_SECONDS, read)
        return keys

    def paramiko_key(self) -> paramiko.PKey:
        """Returns the private key of the key pair."""
        private = self.key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode()
        return paramiko.Ed25519Key.from_private_key(io.StringIO(private))

    def connect(
        self, instance: str, user: str = "admin", through: paramiko.SSHClient | None = None
    ) -> paramiko.SSHClient:
        """Logs in with the host key from the console pinned."""
        kind = "ssh-ed25519"
        pinned = paramiko.Ed25519Key(data=base64.b64decode(self.host_keys(instance)[kind]))
        address = self.describe(instance)["PrivateIpAddress" if through else "PublicIpAddress"]

        def log_in() -> paramiko.SSHClient:
            client = paramiko.SSHClient()
            client.get_host_keys().add(address, kind, pinned)
            client.set_missing_host_key_policy(paramiko.RejectPolicy())
            transport = through.get_transport() if through else None
            channel = transport.open_channel("direct-tcpip", (address, 22), ("127.0.0.1", 0)) if transport else None
            client.connect(
                address, 22, user, pkey=self.paramiko_key(), sock=channel, look_for_keys=False, allow_agent=False,
                timeout=20, banner_timeout=60, auth_timeout=60,
            )  # fmt: skip
            return client

        connected: paramiko.SSHClient = eventually(f"SSH to {instance}", BOOT_SECONDS, log_in)
        return connected


def sh(client: paramiko.SSHClient, script: str, seconds: float = 60) -> tuple[int, str]:
    """Runs a script and returns its exit code and output."""
    _, out, err = client.exec_command(script, timeout=seconds)
    text = out.read().decode() + err.read().decode()
    return out.channel.recv_exit_status(), text.strip()


def reaches(client: paramiko.SSHClient, address: str, port: int) -> bool:
    """Returns whether the machine can open a TCP connection."""
    return sh(client, f"timeout 4 bash -c 'exec 3<>/dev/tcp/{address}/{port}'")[0] == 0


def asks(client: paramiko.SSHClient, server: str) -> bool:
    """Returns whether a DNS server answers the machine over UDP."""
    program = (
        "import socket; s = socket.socket(2, 2); s.settimeout(3); "
        f"s.sendto(bytes.fromhex('13370100000100000000000007657861')+b'mple\\3com\\0\\0\\1\\0\\1', ('{server}', 53)); "
        "print(s.recv(512)[:2].hex())"
    )
    return sh(client, f'python3 -c "{program}"')[1] == "1337"


def make_site(cloud: Ec2Cloud) -> Site:
    """Creates the network, the groups and the key pair."""
    ec2 = cloud.client()
    vpc = ec2.create_vpc(CidrBlock="10.77.0.0/16")["Vpc"]["VpcId"]
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.77.5.0/24")["Subnet"]["SubnetId"]
    tables = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["RouteTables"]
    table = tables[0]["RouteTableId"]
    ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)

    def group(name: str) -> str:
        identity: str = ec2.create_security_group(GroupName=name, Description=name, VpcId=vpc)["GroupId"]
        return identity

    environment, internet = group("environment"), group("internet")
    itself = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": environment}]}
    controller = [{"CidrIp": cloud.controller_cidr}]
    ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": controller}
    ec2.authorize_security_group_ingress(GroupId=environment, IpPermissions=[itself, ssh])
    everywhere = {"IpProtocol": "-1", "IpRanges": ANYWHERE}
    ec2.revoke_security_group_egress(GroupId=environment, IpPermissions=[everywhere])
    ec2.authorize_security_group_egress(GroupId=environment, IpPermissions=[itself])
    key = Ed25519PrivateKey.generate()
    ec2.import_key_pair(
        KeyName="key", PublicKeyMaterial=key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    )
    return Site(cloud, ec2, key, vpc, subnet, table, gateway, environment, internet)
