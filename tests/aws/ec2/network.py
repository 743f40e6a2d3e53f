"""Decides what EC2's network lets through, from security groups, routes and network ACLs alone. Pure.

Judges each layer separately, so that tests can show which layers stop a packet and that each does so alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

ICMP, TCP, UDP = 1, 6, 17
_PROTOCOLS = {"icmp": ICMP, "tcp": TCP, "udp": UDP}


@dataclass(frozen=True)
class GroupRule:
    """Describes one permission of a security group: from or to a network, or the members of a group.

    Args:
        protocol: `tcp`, `udp`, `icmp`, a number, or `-1` for all.
        first, last: ports; for ICMP `first` is the type, -1 for all. Ignored when the protocol is `-1`.
    """

    protocol: str
    first: int
    last: int
    network: IPv4Network | None = None
    group_id: str | None = None


@dataclass(frozen=True)
class Group:
    """Describes a security group. Traffic that no rule permits is denied; replies always pass."""

    id: str
    ingress: tuple[GroupRule, ...]
    egress: tuple[GroupRule, ...]


@dataclass(frozen=True)
class AclEntry:
    """Describes one entry of a network ACL. The lowest matching number decides. Protocol -1 means all."""

    number: int
    egress: bool
    allow: bool
    protocol: int
    network: IPv4Network
    first: int
    last: int


@dataclass(frozen=True)
class Route:
    """Describes one route: to an attached internet gateway (`internet`) or within the VPC (`local`)."""

    network: IPv4Network
    local: bool
    internet: bool


@dataclass(frozen=True)
class Subnet:
    """Describes a subnet with its route table and network ACL."""

    id: str
    network: IPv4Network
    routes: tuple[Route, ...]
    acl: tuple[AclEntry, ...]


@dataclass(frozen=True)
class Vpc:
    """Describes a VPC. Its resolver is in the first of its networks."""

    id: str
    networks: tuple[IPv4Network, ...]
    dns_support: bool


@dataclass(frozen=True)
class Interface:
    """Describes a running instance's only network interface."""

    instance_id: str
    address: IPv4Address
    public_address: IPv4Address | None
    vpc: Vpc
    subnet: Subnet
    groups: tuple[Group, ...]
    metadata: bool


@dataclass(frozen=True)
class Flow:
    """Describes the first packet of a conversation. At least one of the two ends is an instance of the VPC."""

    vpc_id: str
    protocol: int
    source: IPv4Address
    source_port: int
    destination: IPv4Address
    destination_port: int


@dataclass(frozen=True)
class Reachability:
    """Holds each layer's own verdict on a flow."""

    security_groups: bool
    routes: bool
    network_acls: bool

    @property
    def open(self) -> bool:
        """Returns whether the flow passes all layers."""
        return self.security_groups and self.routes and self.network_acls


class Network:
    """Holds all interfaces of a region at one moment."""

    def __init__(self, interfaces: Iterable[Interface] = ()) -> None:
        """Indexes the interfaces."""
        self.interfaces = {interface.instance_id: interface for interface in interfaces}
        self._by_address = {(interface.vpc.id, interface.address): interface for interface in self.interfaces.values()}

    def at(self, vpc_id: str, address: IPv4Address) -> Interface | None:
        """Returns the interface with a private address."""
        return self._by_address.get((vpc_id, address))


def reachability(network: Network, flow: Flow) -> Reachability:
    """Judges a flow between two instances of a VPC, or one and the outside.

    An outside end must not have an address of the VPC: such an address without an instance reaches nothing.
    """
    sender, receiver = network.at(flow.vpc_id, flow.source), network.at(flow.vpc_id, flow.destination)
    return Reachability(
        security_groups=_groups_permit(flow, sender, receiver),
        routes=_routed(sender, receiver, flow.destination) and _routed(receiver, sender, flow.source),
        network_acls=_acls_allow(flow, sender, receiver),
    )


def answers_dns(interface: Interface, address: IPv4Address) -> bool:
    """Returns whether the VPC's resolver answers an instance at an address, which no rule and no route prevents."""
    resolvers = (IPv4Address("169.254.169.253"), interface.vpc.networks[0].network_address + 2)
    return interface.vpc.dns_support and address in resolvers


def _groups_permit(flow: Flow, sender: Interface | None, receiver: Interface | None) -> bool:
    def any_of(rules: Iterable[GroupRule], address: IPv4Address, other: Interface | None) -> bool:
        return any(_rule_matches(rule, flow, address, other) for rule in rules)

    if sender and not any_of((r for g in sender.groups for r in g.egress), flow.destination, receiver):
        return False
    return not receiver or any_of((r for g in receiver.groups for r in g.ingress), flow.source, sender)


def _rule_matches(rule: GroupRule, flow: Flow, address: IPv4Address, other: Interface | None) -> bool:
    if rule.network is not None:
        if address not in rule.network:
            return False
    elif other is None or rule.group_id not in {group.id for group in other.groups}:
        return False
    if rule.protocol == "-1":
        return True
    protocol = _PROTOCOLS.get(rule.protocol) or int(rule.protocol)
    if protocol != flow.protocol:
        return False
    if protocol == ICMP:
        return rule.first in (-1, flow.destination_port)
    return rule.first <= flow.destination_port <= rule.last


def _routed(here: Interface | None, there: Interface | None, address: IPv4Address) -> bool:
    """Returns whether `here` has a route to the other end. An end that is no instance needs none."""
    if here is None:
        return True
    matching = [route for route in here.subnet.routes if address in route.network]
    if not matching:
        return False
    route = max(matching, key=lambda candidate: candidate.network.prefixlen)
    if route.local or any(address in network for network in here.vpc.networks):
        return there is not None
    return route.internet and here.public_address is not None


def _acls_allow(flow: Flow, sender: Interface | None, receiver: Interface | None) -> bool:
    """Checks both directions, since ACLs are stateless. Traffic within a subnet passes no ACL."""
    if sender and receiver and sender.subnet.id == receiver.subnet.id:
        return True
    ways = []
    if sender:
        ways.append((sender.subnet, True, flow.destination, flow.destination_port))
        ways.append((sender.subnet, False, flow.destination, flow.source_port))
    if receiver:
        ways.append((receiver.subnet, False, flow.source, flow.destination_port))
        ways.append((receiver.subnet, True, flow.source, flow.source_port))
    return all(_acl_allows(subnet, egress, flow.protocol, address, port) for subnet, egress, address, port in ways)


def _acl_allows(subnet: Subnet, egress: bool, protocol: int, address: IPv4Address, port: int) -> bool:
    for entry in sorted(subnet.acl, key=lambda line: line.number):
        if entry.egress != egress or address not in entry.network or entry.protocol not in (-1, protocol):
            continue
        if entry.protocol in (TCP, UDP) and not entry.first <= port <= entry.last:
            continue
        return entry.allow
    return False
