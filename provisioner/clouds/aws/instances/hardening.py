"""Completes a machine's boot: host key from the console, hosts file, later boots, metadata service switched off."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from provisioner.clouds.aws.api import Api, asking
from provisioner.clouds.aws.instance_watch import watch
from provisioner.clouds.guest_files import GUEST
from provisioner.errors import InfrastructureError
from provisioner.models import Environment, Role
from provisioner.printable import last_lines
from provisioner.ssh.connection import Connection

HARDEN_SECONDS = 180.0
HOST_KEYS = re.compile(r"BEGIN SSH HOST KEY KEYS-----(.*?)-----END SSH HOST KEY KEYS", re.DOTALL)
HOST_KEY = re.compile(r"^(ssh-ed25519) ([A-Za-z0-9+/=]+)", re.MULTILINE)
CLOUD_INIT_DONE = "until [ -e /run/cloud-init/result.json ]; do sleep 0.2; done"
# With the metadata service off, cloud-init would take a later boot for that of a new machine: it would make new host
# keys and its vendor's user, who may become root, and forget the time to live. So it runs once (cloud-init's
# documentation, "Disable cloud-init"), and a unit does what must be done at each boot. seal.sh removes both.
LATER_BOOTS = """
set -eu
umask 077
mkdir -p /var/lib/provisioner /etc/systemd/system/multi-user.target.wants
cat > /var/lib/provisioner/ttl.sh
cat > /etc/systemd/system/provisioner-later-boots.service <<END
[Unit]
Description=Set the timer that ends this machine
ConditionPathExists=/var/lib/provisioner/ttl.sh

[Service]
Type=oneshot
RemainAfterExit=yes
KillMode=process
ExecStart=/bin/sh /var/lib/provisioner/ttl.sh $1
END
ln -sf ../provisioner-later-boots.service /etc/systemd/system/multi-user.target.wants/
touch /etc/cloud/cloud-init.disabled
"""


def host_key(console: str) -> str | None:
    """Returns the key that cloud-init printed on the console at the first boot; None if it has not yet."""
    block = HOST_KEYS.search(console.replace("\r", ""))
    key = HOST_KEY.search(block[1]) if block else None
    return f"{key[1]} {key[2]}" if key else None


def harden(api: Api, environment: Environment, connections: Mapping[Role, Connection]) -> None:
    """Writes the hosts files, prepares later boots, and switches the metadata service off.

    Raises:
        InfrastructureError: a machine could not be prepared, or AWS did not confirm that its service is off in time.
    """
    expiry, program = str(int(environment.expires_at.timestamp())), (GUEST / "ttl.sh").read_bytes()
    region = environment.placement["region"]
    ec2 = api.client("ec2", region)
    for role, connection in connections.items():
        try:
            connection.run(["sh", "-c", CLOUD_INIT_DONE], timeout_seconds=HARDEN_SECONDS)
        except TimeoutError as error:
            raise InfrastructureError(f"cloud-init did not end on the {role} machine.") from error
        connection.write_file("/etc/hosts", _hosts(environment, role).encode())
        done = connection.run(["sh", "-c", LATER_BOOTS, "sh", expiry], stdin=program)
        if done.exit_code != 0:
            said = last_lines(done.stderr.decode(errors="replace"), 500)
            raise InfrastructureError(f"The {role} machine could not be prepared for a reboot.", details=said)
    instance_ids = [endpoint.instance_id or "" for endpoint in environment.endpoints.values()]
    with asking("Switching the metadata service off"):
        for instance_id in instance_ids:
            ec2.modify_instance_metadata_options(InstanceId=instance_id, HttpEndpoint="disabled")
    deadline = time.monotonic() + HARDEN_SECONDS
    # Shared by all waiting threads: many environments boot at once.
    while not metadata_is_off(watch(api, region).rows(api, instance_ids), instance_ids):
        if time.monotonic() > deadline:
            raise InfrastructureError(f"AWS did not switch the metadata service of {environment.id} off in time.")
        time.sleep(0.5)


def metadata_is_off(instances: Iterable[dict[str, Any]], instance_ids: Iterable[str | None]) -> bool:
    """Whether the metadata service of each machine is off, and that has taken effect. Pure.

    Args:
        instances: what EC2 says; a machine that it does not name may have its service on.
        instance_ids: the machines' ids, at least one.
    """
    options = {instance["InstanceId"]: instance["MetadataOptions"] for instance in instances}
    machines = [options.get(instance_id, {}) for instance_id in instance_ids]
    return bool(machines) and all(
        machine.get("HttpEndpoint") == "disabled" and machine.get("State") == "applied" for machine in machines
    )


def _hosts(environment: Environment, role: Role) -> str:
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    addresses = {name: endpoint.private_address for name, endpoint in environment.endpoints.items()}
    lines += [f"{address} {environment.hostname(name)}" for name, address in addresses.items() if address]
    if not addresses[role]:
        lines.append(f"127.0.1.1 {environment.hostname(role)}")
    for destination in environment.allowed_destinations:
        lines += [f"{destination.cidr.split('/')[0]} {name}" for name in destination.host_names]
    return "\n".join(lines) + "\n"
