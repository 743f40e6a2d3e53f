"""EC2 with real machines behind it, tried by boto3 and paramiko alone: what other tests build on.

No change of the product can break it, and it takes ten minutes of emulated machines: `scripts/test ec2` runs it.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import paramiko
import pytest
from botocore.exceptions import ClientError

from tests.aws.ec2.cloud import Ec2Cloud
from tests.aws.ec2.site import ANYWHERE, BOOT_SECONDS, Site, asks, eventually, make_site, reaches, sh
from tests.homes import cache

pytestmark = [pytest.mark.vm, pytest.mark.ec2]

# A host of the internet that a server of the test stands for (TEST-NET-2: never a real host).
OUTSIDE = ("198.51.100.7", 8080)
USER_DATA = '#cloud-config\nruncmd: ["echo from-user-data > /var/tmp/mark"]\n'
ROOT_USER_DATA = "#cloud-config\ndisable_root: false\n"


@pytest.fixture(scope="module")
def outside() -> Iterator[int]:
    """A web server on this host that stands for a host of the internet; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"outside\n")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def cloud(outside: int) -> Iterator[Ec2Cloud]:
    """A cloud of this module's own, with a host of the internet."""
    with Ec2Cloud(cache() / "ec2", outside={OUTSIDE: outside}) as started:
        yield started
        directory = started.directory
    assert not directory.exists()


@pytest.fixture(scope="module")
def site(cloud: Ec2Cloud) -> Site:
    """The network and the key pair of all tests here."""
    return make_site(cloud)


@pytest.fixture(scope="module")
def pair(site: Site) -> tuple[str, str]:
    """An instance with internet and a public address, and one with neither, booted side by side."""
    primary = site.run(
        USER_DATA,
        groups=[site.environment_group, site.internet_group],
        public=True,
        MetadataOptions={"HttpTokens": "required"},
    )
    aux = site.run(ROOT_USER_DATA, groups=[site.environment_group], public=False)
    return primary, aux


@pytest.fixture(scope="module")
def primary(site: Site, pair: tuple[str, str]) -> Iterator[paramiko.SSHClient]:
    """A login on the instance with internet, after cloud-init is done."""
    with site.connect(pair[0]) as client:
        eventually(
            "the end of cloud-init", BOOT_SECONDS, lambda: sh(client, "test -e /run/cloud-init/result.json")[0] == 0
        )
        yield client


@pytest.fixture(scope="module")
def aux(site: Site, pair: tuple[str, str], primary: paramiko.SSHClient) -> Iterator[paramiko.SSHClient]:
    """A login on the offline instance, by way of the other."""
    with site.connect(pair[1], "root", through=primary) as client:
        yield client


def test_the_amis_user_has_sudo_and_user_data_ran(primary: paramiko.SSHClient) -> None:
    assert sh(primary, "sudo -n id -un; cat /var/tmp/mark") == (0, "root\nfrom-user-data")


def test_root_is_only_let_in_where_user_data_says_so(
    site: Site, pair: tuple[str, str], primary: paramiko.SSHClient, aux: paramiko.SSHClient
) -> None:
    with site.connect(pair[0], "root") as refused:
        code, text = sh(refused, "id -un")
    assert "Please login as the user" in text
    assert code != 0
    assert sh(aux, "id -un") == (0, "root")


def test_another_host_key_than_the_consoles_is_refused(site: Site, pair: tuple[str, str], primary: object) -> None:
    address = site.describe(pair[0])["PublicIpAddress"]
    assert address.startswith("127.")
    client = paramiko.SSHClient()
    with client:
        ours = site.paramiko_key()
        client.get_host_keys().add(address, "ssh-ed25519", ours)
        with pytest.raises(paramiko.BadHostKeyException):
            client.connect(address, 22, "admin", pkey=ours, look_for_keys=False, allow_agent=False, banner_timeout=60)


def test_instances_of_a_group_reach_each_other_on_any_port(
    site: Site, pair: tuple[str, str], primary: paramiko.SSHClient, aux: paramiko.SSHClient
) -> None:
    addresses = {name: site.describe(name)["PrivateIpAddress"] for name in pair}
    for here, there, address in ((primary, aux, addresses[pair[1]]), (aux, primary, addresses[pair[0]])):
        sh(there, "nohup python3 -m http.server 8099 > /dev/null 2>&1 &")
        eventually("the neighbour's server", 30, functools.partial(reaches, here, address, 8099))
        assert sh(here, f"ping -c 1 -W 5 {address}")[0] == 0
        assert not reaches(here, address, 8100)


def test_internet_needs_the_group_the_route_and_the_acl_each(site: Site, primary: paramiko.SSHClient) -> None:
    ec2 = site.ec2

    def out() -> bool:
        return reaches(primary, *OUTSIDE)

    def stops() -> None:
        time.sleep(1)
        assert not out()

    assert out()
    everywhere = [{"IpProtocol": "-1", "IpRanges": ANYWHERE}]
    ec2.revoke_security_group_egress(GroupId=site.internet_group, IpPermissions=everywhere)
    stops()
    ec2.authorize_security_group_egress(GroupId=site.internet_group, IpPermissions=everywhere)
    eventually("internet with the group", 10, out)

    # The controller keeps its own route, so that the test can look.
    controller = site.cloud.controller_cidr
    ec2.create_route(RouteTableId=site.route_table, DestinationCidrBlock=controller, GatewayId=site.gateway)
    ec2.delete_route(RouteTableId=site.route_table, DestinationCidrBlock="0.0.0.0/0")
    stops()
    ec2.create_route(RouteTableId=site.route_table, DestinationCidrBlock="0.0.0.0/0", GatewayId=site.gateway)
    eventually("internet with the route", 10, out)

    acls = ec2.describe_network_acls(Filters=[{"Name": "association.subnet-id", "Values": [site.subnet]}])
    acl = acls["NetworkAcls"][0]["NetworkAclId"]
    entry = {"NetworkAclId": acl, "RuleNumber": 50, "Egress": True}
    ec2.create_network_acl_entry(**entry, Protocol="-1", RuleAction="deny", CidrBlock="198.51.100.0/24")
    stops()
    ec2.delete_network_acl_entry(**entry)
    eventually("internet with the network ACL", 10, out)


def test_only_the_instance_with_internet_gets_out(primary: paramiko.SSHClient, aux: paramiko.SSHClient) -> None:
    assert sh(primary, f"curl -sS -m 20 http://{OUTSIDE[0]}:{OUTSIDE[1]}/") == (0, "outside")
    assert sh(primary, "curl -sSI -m 30 https://deb.debian.org/ | head -1")[1].startswith("HTTP/")
    assert not reaches(aux, *OUTSIDE)
    assert not reaches(aux, "1.1.1.1", 443)
    assert not asks(aux, "1.1.1.1")


def test_no_instance_reaches_the_hosts_loopback(
    cloud: Ec2Cloud, primary: paramiko.SSHClient, aux: paramiko.SSHClient, outside: int
) -> None:
    api = int(cloud.endpoint_url.rpartition(":")[2])
    addresses = ("10.77.5.1", "10.77.0.1", "169.254.169.254", "127.0.0.2")
    tries = [
        f"timeout 4 bash -c 'exec 3<>/dev/tcp/{a}/{port}' && echo {a} &" for a in addresses for port in (api, outside)
    ]
    for client in (primary, aux):
        assert sh(client, "{ " + " ".join(tries) + " wait; } 2> /dev/null") == (0, "")


def test_the_resolver_answers_offline_until_dns_is_off(site: Site, aux: paramiko.SSHClient) -> None:
    for resolver in ("169.254.169.253", "10.77.0.2"):
        assert asks(aux, resolver)
    site.ec2.modify_vpc_attribute(VpcId=site.vpc, EnableDnsSupport={"Value": False})
    time.sleep(1)
    for resolver in ("169.254.169.253", "10.77.0.2"):
        assert not asks(aux, resolver)
    site.ec2.modify_vpc_attribute(VpcId=site.vpc, EnableDnsSupport={"Value": True})


def test_metadata_is_there_until_it_is_turned_off(
    site: Site, pair: tuple[str, str], primary: paramiko.SSHClient
) -> None:
    base = "http://169.254.169.254/latest"
    take = f"curl -sS -m 10 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' {base}/api/token"
    read = f'curl -sS -m 10 -H "X-aws-ec2-metadata-token: $({take})" {base}'
    assert sh(primary, f"{read}/meta-data/instance-id") == (0, pair[0])
    assert sh(primary, f"{read}/user-data")[1] == USER_DATA.strip()
    assert sh(primary, f"curl -s -m 10 -o /dev/null -w %{{http_code}} {base}/meta-data/")[1] == "401"
    assert sh(primary, f"{read}/meta-data/iam/security-credentials/") == (0, "")

    site.ec2.modify_instance_metadata_options(InstanceId=pair[0], HttpEndpoint="disabled")

    def options() -> dict[str, Any]:
        metadata_options: dict[str, Any] = site.describe(pair[0])["MetadataOptions"]
        return metadata_options

    eventually("the change of the metadata options", 10, lambda: options()["State"] == "applied")
    assert options()["HttpTokens"] == "required"
    code, text = sh(primary, f"curl -sS -m 5 {base}/meta-data/")
    assert code == 28, text  # timed out


def test_an_image_of_a_stopped_instance_boots_with_own_keys(
    site: Site, pair: tuple[str, str], primary: paramiko.SSHClient, aux: paramiko.SSHClient
) -> None:
    ec2 = site.ec2
    with pytest.raises(ClientError, match="IncorrectInstanceState"):
        ec2.create_image(InstanceId=pair[1], Name="too early")
    old_keys = site.host_keys(pair[1])
    assert sh(aux, "echo kept > /root/kept")[0] == 0  # not synced: a power-off must do that
    ec2.stop_instances(InstanceIds=[pair[1]])
    assert site.state(pair[1]) == "stopping"
    eventually("the stop", 120, lambda: site.state(pair[1]) == "stopped")
    tags = [{"Key": "made-by", "Value": "test"}]
    kinds = [{"ResourceType": kind, "Tags": tags} for kind in ("image", "snapshot")]
    # What one request has changed, the next may not see yet (tests/aws/moto_gaps.py).
    with pytest.raises(ClientError, match="IncorrectInstanceState"):
        ec2.create_image(InstanceId=pair[1], Name="kept", TagSpecifications=kinds)
    image = ec2.create_image(InstanceId=pair[1], Name="kept", TagSpecifications=kinds)["ImageId"]
    ec2.terminate_instances(InstanceIds=[pair[1]])
    with pytest.raises(ClientError, match=r"InvalidAMIID\.NotFound"):
        ec2.describe_images(ImageIds=[image])
    described = ec2.describe_images(ImageIds=[image])["Images"][0]
    assert (described["State"], described["Tags"]) == ("available", tags)
    snapshot = described["BlockDeviceMappings"][0]["Ebs"]["SnapshotId"]
    assert ec2.describe_snapshots(SnapshotIds=[snapshot])["Snapshots"][0]["Tags"] == tags

    disk = {"DeviceName": described["RootDeviceName"], "Ebs": {"VolumeSize": 11, "DeleteOnTermination": True}}
    child = site.run(
        ROOT_USER_DATA, groups=[site.environment_group], public=True, image=image,
        InstanceInitiatedShutdownBehavior="terminate", BlockDeviceMappings=[disk],
    )  # fmt: skip
    with site.connect(child, "root") as client:
        assert sh(client, "cat /root/kept; hostname") == (
            0,
            "kept\n" + site.describe(child)["PrivateDnsName"].partition(".")[0],
        )
        assert int(sh(client, "df --output=size -BG / | tail -1")[1].rstrip("G")) >= 10
        assert site.host_keys(child)["ssh-ed25519"] != old_keys["ssh-ed25519"]
        assert not reaches(client, *OUTSIDE)
        sh(client, "systemctl poweroff")
    eventually("the end of a machine that turned itself off", 120, lambda: site.state(child) == "terminated")
    assert site.describe(child)["StateReason"]["Code"] == "Client.InstanceInitiatedShutdown"


def test_a_terminated_instance_leaves_nothing(site: Site, pair: tuple[str, str], primary: object) -> None:
    cloud = site.cloud
    address = site.describe(pair[0])["PublicIpAddress"]
    pid = cloud.machines()[pair[0]]
    site.ec2.terminate_instances(InstanceIds=list(pair))
    assert site.state(pair[0]) == "terminated"
    assert not Path(f"/proc/{pid}").exists()
    assert (cloud.machines(), cloud.left()) == ({}, [])
    assert address not in listening_addresses()
    assert site.ec2.describe_volumes()["Volumes"] == []
    assert site.ec2.describe_network_interfaces()["NetworkInterfaces"] == []


def listening_addresses() -> set[str]:
    """The IPv4 addresses on which any process listens on port 22."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {
        ".".join(str(part) for part in reversed(bytes.fromhex(fields[1].partition(":")[0])))
        for fields in lines
        if fields[3] == "0A" and fields[1].endswith(":0016")
    }


def test_a_killed_test_process_leaves_nothing(tmp_path: Path) -> None:
    program = """
import json, sys, time
from pathlib import Path
from tests.aws.ec2.cloud import Ec2Cloud
cloud = Ec2Cloud(Path(sys.argv[1]))
ec2 = cloud.client()
subnet = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
ec2.run_instances(ImageId=cloud.debian_ami_id, InstanceType="t3.micro", MinCount=1, MaxCount=1, SubnetId=subnet)
while not cloud.machines():
    time.sleep(0.1)
print(json.dumps([cloud._process.pid, *cloud.machines().values(), str(cloud.directory)]), flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, str(cache() / "ec2")], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stdout is not None
        *pids, directory = json.loads(process.stdout.readline())
        children = [child for pid in pids for child in children_of(pid)]
        os.kill(process.pid, signal.SIGKILL)
    everyone = {*pids, *children}
    assert len(everyone) == 3, "the server, QEMU and passt"
    eventually("the end of all processes", 20, lambda: not any(Path(f"/proc/{pid}").exists() for pid in everyone))
    eventually("the end of all files", 20, lambda: not Path(directory).exists())


def children_of(pid: int) -> list[int]:
    """The processes that a process, by whichever of its threads, has started."""
    lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for found in lists for child in found]
