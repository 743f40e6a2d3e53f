"""What a local machine is told when it starts (credential_port.py). Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from hashlib import sha256

from provisioner.clouds.local.egress_rules import GATEWAY, GUEST_ADDRESS, RESOLVER
from provisioner.clouds.local.images import DISK_GIB
from provisioner.models import Environment, Role

# As the kernel counts a disk's size.
SECTORS_PER_GIB = (1 << 30) // 512


def credentials(
    environment: Environment, role: Role, host_key: str, authorized_keys: Mapping[str, str]
) -> dict[str, str]:
    """Returns the credentials of one machine, by name.

    Args:
        host_key: the private SSH host key.
        authorized_keys: user -> lines of authorized_keys.
    """
    addresses = private_addresses(environment.addresses_of or environment.id)
    values = {
        "hostname": role,
        "hosts": "\n".join(_hosts(environment, addresses)) + "\n",
        "host_key": host_key,
        "expires_at": str(int(environment.expires_at.timestamp())),
        **{f"authorized_keys.{user}": lines for user, lines in authorized_keys.items()},
    }
    if len(environment.machines) > 1:
        values["private_address"] = str(addresses[role])
    if environment.full_internet or environment.allowed_destinations:
        values["internet"] = f"{GUEST_ADDRESS} {GATEWAY}\n"
    if environment.full_internet:
        values["resolver"] = RESOLVER
    if environment.machines[role].size.disk_gib > DISK_GIB:
        values["grow"] = str(environment.machines[role].size.disk_gib * SECTORS_PER_GIB)
    return values


def private_addresses(environment_id: str) -> dict[Role, ipaddress.IPv4Interface]:
    """Returns the addresses of an environment's machines on their private link.

    A /29 out of 10.213.0.0/16, derived from the environment's id. The link joins the two machines and nothing else,
    so two environments with the same addresses do not disturb each other.
    """
    block = int.from_bytes(sha256(environment_id.encode()).digest()[:2], "big") & ~7
    first = int(ipaddress.IPv4Address("10.213.0.0")) + block
    return {
        "primary": ipaddress.IPv4Interface((first + 2, 29)),
        "aux": ipaddress.IPv4Interface((first + 3, 29)),
    }


def _hosts(environment: Environment, addresses: Mapping[Role, ipaddress.IPv4Interface]) -> list[str]:
    """The lines of /etc/hosts."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    if len(environment.machines) > 1:
        lines += [f"{addresses[role].ip} {role}" for role in environment.machines]
    else:
        lines += [f"127.0.1.1 {role}" for role in environment.machines]  # sudo looks the machine's own name up
    for destination in environment.allowed_destinations:
        address = destination.cidr.split("/")[0]
        lines += [f"{address} {name}" for name in destination.host_names]
    return lines
