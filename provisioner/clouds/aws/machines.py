"""EC2 instances from their first boot to their end: user data, host key, later boots, and the metadata service off.

What exists is asked of EC2 by tag, never of a record.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from provisioner.base.clock import now
from provisioner.base.errors import HostError, InfrastructureError
from provisioner.base.models import Environment, Role
from provisioner.base.printable import last_lines
from provisioner.clouds.aws import cleanup, network, schedules
from provisioner.clouds.aws.account import Account
from provisioner.clouds.aws.api import EXPIRY_TAG, LEASE_TAG, asking, timestamp
from provisioner.clouds.aws.instance_watch import metadata_is_off, watch
from provisioner.clouds.cloud import TerminationReason
from provisioner.clouds.guest_files import GUEST
from provisioner.ssh.connection import Connection
from provisioner.store.files import LEASE, locked
from provisioner.store.home import Home

# EC2 API reference, StateReason: the machine was shut down from within.
SWITCHED_OFF = "Client.InstanceInitiatedShutdown"
HARDEN_SECONDS = 180.0
HOST_KEYS = re.compile(r"BEGIN SSH HOST KEY KEYS-----(.*?)-----END SSH HOST KEY KEYS", re.DOTALL)
# The base64 of a whole ed25519 key: its 51 bytes begin with the name of its type (RFC 8709).
HOST_KEY = re.compile(r"^ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI[A-Za-z0-9+/]{43}(?=[ \n])", re.MULTILINE)
# The kernel writes to the same console, also in the middle of a line.
KERNEL_LINE = re.compile(r"\[ *\d+\.\d{6}\][^\n]*\n")
CLOUD_INIT_DONE = "until [ -e /run/cloud-init/result.json ]; do sleep 0.2; done"
LATER_BOOTS = Path(__file__).with_name("later_boots.sh")


class AwsMachines:
    """EC2 instances of one account."""

    account: Account
    gateways: Mapping[bool, tuple[str, ...]] = {
        True: ("10.214.0.1", "10.214.0.2"),
        False: ("10.215.0.1", "10.215.0.2"),
    }
    """The subnet's router and the VPC's resolver: in a VPC, neither leads to the controller."""

    def prepare(self, environment: Environment, authorized_keys: Mapping[Role, Mapping[str, str]]) -> None:
        """Writes each machine's user data to the environment's directory."""
        for role in environment.machines:
            text = cloud_config(environment.hostname(role), authorized_keys.get(role, {}), environment.expires_at)
            user_data_path(self.account.home, environment, role).write_text(text)

    def host_key(self, environment: Environment, role: Role) -> str | None:
        """Returns the key that cloud-init printed on the console at the first boot.

        None if it has not, or if so many consoles were read just now that EC2 would refuse.
        """
        if not watch(self.account.api, environment.placement["region"]).may_read_console():
            return None
        return host_key_in(self.console(environment, role))

    def harden(self, environment: Environment, connections: Mapping[Role, Connection]) -> None:
        """Writes the hosts files, prepares later boots, and switches the metadata service off.

        Raises:
            InfrastructureError: a machine could not be prepared, or AWS did not confirm in time.
        """
        expiry, program = str(int(environment.expires_at.timestamp())), (GUEST / "ttl.sh").read_bytes()
        for role, connection in connections.items():
            try:
                connection.run(["sh", "-c", CLOUD_INIT_DONE], timeout_seconds=HARDEN_SECONDS)
            except TimeoutError as error:
                raise InfrastructureError(f"cloud-init did not end on the {role} machine.") from error
            connection.write_file("/etc/hosts", _hosts(environment, role).encode())
            done = connection.run(["sh", "-c", LATER_BOOTS.read_text(), "sh", expiry], stdin=program)
            if done.exit_code != 0:
                said = last_lines(done.stderr.decode(errors="replace"), 500)
                raise InfrastructureError(f"The {role} machine could not be prepared for a reboot.", details=said)
        api, region = self.account.api, environment.placement["region"]
        instance_ids = [endpoint.instance_id or "" for endpoint in environment.endpoints.values()]
        with asking("Switching the metadata service off"):
            for instance_id in instance_ids:
                api.client("ec2", region).modify_instance_metadata_options(
                    InstanceId=instance_id, HttpEndpoint="disabled"
                )
        deadline = time.monotonic() + HARDEN_SECONDS
        # Shared by all waiting threads: many environments boot at once.
        while not metadata_is_off(watch(api, region).rows(api, instance_ids), instance_ids):
            if time.monotonic() > deadline:
                raise InfrastructureError(f"AWS did not switch the metadata service of {environment.id} off in time.")
            time.sleep(0.5)

    def alive(self, environment: Environment, role: Role) -> bool:
        """Whether EC2 calls the machine anything but stopped or terminated, or does not say."""
        name, region = _instance_id(environment, role), environment.placement.get("region")
        if name is None or region is None:  # nothing was created
            return False
        return watch(self.account.api, region).state(self.account.api, name) not in ("stopped", "terminated")

    def termination_reason(self, environment: Environment, role: Role) -> TerminationReason:
        """Returns EC2's state reason, such as `Server.SpotInstanceTermination: ...`."""
        name, region = _instance_id(environment, role), environment.placement.get("region")
        known = cleanup.instances(self.account.api, region, environment.id) if region else []
        for instance in known:
            if instance["InstanceId"] == name:
                reason = instance.get("StateReason") or {}
                code = str(reason.get("Code") or "")
                return TerminationReason(str(reason.get("Message") or code), from_within=code == SWITCHED_OFF)
        return TerminationReason()

    def impairment(self, environment: Environment, role: Role) -> str:
        """Returns what EC2 says of the instance's host. The instance's own status check does not count."""
        name = _instance_id(environment, role)
        if name is None:
            return ""
        with contextlib.suppress(InfrastructureError), asking("Reading the status"):
            ec2 = self.account.api.client("ec2", environment.placement["region"])
            for status in ec2.describe_instance_status(InstanceIds=[name])["InstanceStatuses"]:
                if status["SystemStatus"]["Status"] == "impaired":
                    return "EC2's system status check says impaired"
        return ""

    def console(self, environment: Environment, role: Role) -> str:
        """Returns the end of the serial console, as EC2 keeps it."""
        instance = _instance_id(environment, role)
        if instance is None:
            return ""
        # An instance that is gone, or has only just been created, has none.
        with contextlib.suppress(InfrastructureError), asking("Reading the console"):
            ec2 = self.account.api.client("ec2", environment.placement["region"])
            return str(ec2.get_console_output(InstanceId=instance, Latest=True).get("Output", ""))
        return ""

    def unreachable_hint(self, environment: Environment) -> str | None:
        """Names a block of public addresses, or else the addresses that are let in.

        SSH may leave this host by another address than its requests to checkip.
        """
        region = environment.placement.get("region", self.account.region)
        if blocked := network.blocked_access(self.account.api, region):
            return f"{blocked} {network.BLOCKED_HINT}"
        if self.account.settings.controller_cidrs:
            return None
        let_in = environment.placement.get(network.CONTROLLERS, "")
        return (
            f"Only {let_in} is let in. If SSH leaves this host by another address, as with several or behind an HTTP "
            "proxy, name its networks: controller_cidrs in the configuration file, PROVISIONER_CONTROLLER_CIDRS."
        )

    def move_ttl(self, environment: Environment) -> None:
        """Moves the schedule, and what the tags say of it."""
        api, region = self.account.api, environment.placement["region"]
        schedules.move(api, region, environment.id, environment.expires_at)
        cleanup.retag(api, region, environment.id, {EXPIRY_TAG: timestamp(environment.expires_at)})

    def authorize(self, environment: Environment, open_network: Callable[[], None]) -> None:
        """Opens the group and the environment's own subnet. The region's network is Terraform's."""
        known = environment.placement.get(network.CONTROLLERS, "").split()
        try:
            own = self.account.controllers
        except HostError:  # its address cannot be determined now
            return
        if known and not own <= set(known):
            with locked(self.account.home.locks / f"admission-{environment.id}"):
                open_network()
                network.admit(self.account.api, environment, own)

    def renew_lease(self, environment: Environment) -> None:
        """Records in a tag until when other controllers should assume that this one is alive."""
        until = {LEASE_TAG: timestamp(now() + LEASE)}
        cleanup.retag(self.account.api, environment.placement["region"], environment.id, until)


def _instance_id(environment: Environment, role: Role) -> str | None:
    endpoint = environment.endpoints.get(role)
    return endpoint.instance_id if endpoint else None


def _hosts(environment: Environment, role: Role) -> str:
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    addresses = {name: endpoint.private_address for name, endpoint in environment.endpoints.items()}
    lines += [f"{address} {environment.hostname(name)}" for name, address in addresses.items() if address]
    if not addresses[role]:
        lines.append(f"127.0.1.1 {environment.hostname(role)}")
    for destination in environment.allowed_destinations:
        lines += [f"{destination.cidr.split('/')[0]} {name}" for name in destination.host_names]
    return "\n".join(lines) + "\n"


def host_key_in(console: str) -> str | None:
    """Returns the host key that cloud-init printed, as `TYPE BASE64`; None if it is not there whole. Pure.

    Args:
        console: what EC2 keeps of the serial console, which the kernel writes to, too.
    """
    block = HOST_KEYS.search(KERNEL_LINE.sub("", console.replace("\r", "")))
    key = HOST_KEY.search(block[1]) if block else None
    return key[0] if key else None


def user_data_path(home: Home, environment: Environment, role: Role) -> Path:
    """Returns where a machine's user data lies, in the environment's directory."""
    return home.environments / environment.id / f"user-data-{role}"


def cloud_config(hostname: str, authorized_keys: Mapping[str, str], expires_at: datetime) -> str:
    """Returns user data for cloud-init, which also gives root the key pair's public key and creates new host keys.

    Nothing in it is secret: the machine can read it.

    Args:
        hostname: the machine's name.
        authorized_keys: user -> lines of authorized_keys.
        expires_at: when the machine powers itself off, set at each boot before anything else.
    """
    program = (GUEST / "ttl.sh").read_text()
    files = [
        {"path": f"/etc/ssh/authorized_keys.d/{user}", "content": lines, "owner": "root:root", "permissions": "0644"}
        for user, lines in sorted(authorized_keys.items())
    ]
    settings = {
        "users": [],  # no vendor's user: our own scripts decide what users there are
        "disable_root": False,
        "ssh_pwauth": False,
        "ssh_deletekeys": True,
        "manage_etc_hosts": False,
        "hostname": hostname,
        "write_files": files,
        "bootcmd": [["sh", "-c", program, "ttl", str(int(expires_at.timestamp()))]],
    }
    # JSON is valid YAML.
    return "#cloud-config\n" + json.dumps(settings, indent=1) + "\n"
