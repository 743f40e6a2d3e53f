"""Checks and resolves the allowlist of an offline environment: `--allow HOST:PORT` or `CIDR:PORT`. IPv4 only."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from provisioner.base.errors import UsageError
from provisioner.base.models import Destination
from provisioner.base.validation import shown

# Networks that no environment may reach, and why.
_REFUSED = (
    ("127.0.0.0/8", "loopback: the machine itself"),
    ("169.254.0.0/16", "link-local: the cloud's metadata and credentials"),
    ("100.100.100.200/32", "Alibaba Cloud's metadata and credentials"),
    ("168.63.129.16/32", "Azure's wire server"),
    ("192.0.0.0/24", "special purpose: metadata on Oracle Cloud Classic"),
    ("224.0.0.0/4", "multicast"),
    ("240.0.0.0/4", "reserved"),
    ("0.0.0.0/8", "this network"),
)

# RFC 1123, section 2.1: letters, digits and hyphens, no hyphen at the ends of a label.
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_MAXIMUM_HOST_CHARACTERS = 253


@dataclass(frozen=True)
class AllowedDestination:
    """One `--allow` argument, not yet resolved.

    Args:
        target: an IPv4 network in CIDR form, or a host name.
        port: a TCP port.
        is_name: whether target is a host name.
    """

    target: str
    port: int
    is_name: bool


FORM_HINT = "Give one destination at a time, without https:// and path: example.org:443."


def parse_destination(text: str) -> AllowedDestination:
    """Parses HOST:PORT, ADDRESS:PORT or CIDR:PORT.

    Raises:
        UsageError: the text has none of these forms, or no environment may reach the destination.
    """
    target, colon, port_text = text.rpartition(":")
    where = f"The destination {shown(text)}"
    if not colon or not target or set("/,") & set(port_text) or set(",@") & set(target) or "://" in text:
        raise UsageError(f"{where} must have the form HOST:PORT or CIDR:PORT.", hint=FORM_HINT)
    if ":" in target:
        raise UsageError(f"{where} is IPv6; only IPv4 addresses and host names can be allowed.")
    if not re.fullmatch(r"[0-9]{1,5}", port_text) or not 1 <= int(port_text) <= 65535:
        raise UsageError(f"{where}: the port must be a number from 1 to 65535.")
    if re.fullmatch(r"[0-9./]+", target):
        return AllowedDestination(str(_network(target, where)), int(port_text), is_name=False)
    if not _is_host_name(target):
        raise UsageError(f"{where}: {shown(target)} is neither a host name nor an IPv4 network.")
    return AllowedDestination(target.lower(), int(port_text), is_name=True)


def resolve(allowed: Iterable[AllowedDestination]) -> tuple[Destination, ...]:
    """Resolves the host names once, by DNS on the controller, since the machines have no DNS.

    Raises:
        UsageError: a name has no IPv4 address, or has one that no environment may reach.
    """
    names: dict[tuple[str, int], list[str]] = {}
    for destination in allowed:
        for cidr in _addresses(destination) if destination.is_name else [destination.target]:
            hosts = names.setdefault((cidr, destination.port), [])
            if destination.is_name and destination.target not in hosts:
                hosts.append(destination.target)
    return tuple(Destination(cidr=cidr, port=port, host_names=tuple(hosts)) for (cidr, port), hosts in names.items())


def _network(text: str, where: str) -> ipaddress.IPv4Network:
    try:
        network = ipaddress.IPv4Network(text)
    except ValueError as error:
        raise UsageError(f"{where}: {error}.") from None
    if network.prefixlen == 0:
        raise UsageError(
            f"{where} is the whole internet.",
            hint="A task that needs it asks for the permission full_internet, and an eval's machines for "
            "`internet: full`.",
        )
    for refused, reason in _REFUSED:
        if network.overlaps(ipaddress.IPv4Network(refused)):
            raise UsageError(f"{where} reaches {refused} ({reason}), which cannot be allowed.")
    return network


def _is_host_name(text: str) -> bool:
    labels = text.split(".")
    # A last label of digits would be parsed as part of an address.
    return len(text) <= _MAXIMUM_HOST_CHARACTERS and all(map(_LABEL.fullmatch, labels)) and not labels[-1].isdigit()


def _addresses(destination: AllowedDestination) -> list[str]:
    name = destination.target
    try:
        answers = socket.getaddrinfo(name, destination.port, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"The destination {name}:{destination.port} has no IPv4 address: {error.strerror}.",
            hint="Names are resolved on this machine: check that it can resolve this one.",
        ) from error
    addresses = sorted({str(answer[4][0]) for answer in answers})
    where = f"The destination {name}:{destination.port}, at {', '.join(addresses)},"
    return [str(_network(address, where)) for address in addresses]
