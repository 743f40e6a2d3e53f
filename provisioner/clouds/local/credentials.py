"""What a local machine is told when it starts (vm/credential_port.py). Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from hashlib import sha256

from provisioner.base.models import Environment, Role
from provisioner.clouds.local.images import DISK_GIB
from provisioner.clouds.local.network.egress import GATEWAY, GUEST_ADDRESS, RESOLVER

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
    addresses = private_addresses(environment.addresses_of or environment.id, environment.roles)
    values = {
        "hostname": environment.hostname(role),
        "hosts": "\n".join(_hosts(environment, addresses)) + "\n",
        "host_key": host_key,
        "expires_at": str(int(environment.expires_at.timestamp())),
        **{f"authorized_keys.{user}": lines for user, lines in authorized_keys.items()},
    }
    if len(environment.machines) > 1:
        values["private_address"] = str(addresses[role])
        values["link_mac"] = link_mac(addresses[role])
    if environment.full_internet or environment.allowed_destinations:
        values["internet"] = f"{GUEST_ADDRESS} {GATEWAY}\n"
    if environment.full_internet:
        values["resolver"] = RESOLVER
    if environment.machines[role].size.disk_gib > DISK_GIB:
        values["grow"] = str(environment.machines[role].size.disk_gib * SECTORS_PER_GIB)
    return values


def private_addresses(environment_id: str, roles: Sequence[Role]) -> dict[Role, ipaddress.IPv4Interface]:
    """Returns the addresses of an environment's machines on their private link.

    A part of 10.213.0.0/16, derived from the environment's id: a /29 for up to five machines, a larger one for more.
    The link joins these machines and nothing else, so two environments with the same addresses do not disturb each
    other.

    Args:
        roles: the machines' roles, always in the same order.
    """
    bits = max(3, (len(roles) + 2).bit_length())
    block = int.from_bytes(sha256(environment_id.encode()).digest()[:2], "big") >> bits << bits
    first = int(ipaddress.IPv4Address("10.213.0.0")) + block
    return {role: ipaddress.IPv4Interface((first + 2 + place, 32 - bits)) for place, role in enumerate(roles)}


def link_mac(address: ipaddress.IPv4Interface) -> str:
    """Returns the address of a machine's card on the private link: no two machines there may have the same.

    52:54 and the IPv4 address: a locally administered one (IEEE 802, bit 2 of the first byte).
    """
    return ":".join(f"{byte:02x}" for byte in (0x52, 0x54, *address.ip.packed))


def _hosts(environment: Environment, addresses: Mapping[Role, ipaddress.IPv4Interface]) -> list[str]:
    """The lines of /etc/hosts."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    if len(environment.machines) > 1:
        lines += [f"{addresses[role].ip} {environment.hostname(role)}" for role in environment.roles]
    else:  # sudo looks the machine's own name up
        lines += [f"127.0.1.1 {environment.hostname(role)}" for role in environment.roles]
    for destination in environment.allowed_destinations:
        address = destination.cidr.split("/")[0]
        lines += [f"{address} {name}" for name in destination.host_names]
    return lines
