"""Tests the network's rules without any machine: each layer's own verdict."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network

import pytest

from tests.aws.ec2.network import (
    ICMP,
    TCP,
    UDP,
    AclEntry,
    Flow,
    Group,
    GroupRule,
    Interface,
    Network,
    Reachability,
    Route,
    Subnet,
    Vpc,
    answers_dns,
    reachability,
)

pytestmark = pytest.mark.story

ANYWHERE = IPv4Network("0.0.0.0/0")
CONTROLLER = IPv4Address("203.0.113.10")
PUBLIC = IPv4Address("198.51.100.7")
VPC = Vpc("vpc-1", (IPv4Network("10.0.0.0/16"),), dns_support=True)
ALLOW_ALL = (AclEntry(100, True, True, -1, ANYWHERE, -1, -1), AclEntry(100, False, True, -1, ANYWHERE, -1, -1))
LOCAL = Route(IPv4Network("10.0.0.0/16"), local=True, internet=False)
INTERNET = Route(ANYWHERE, local=False, internet=True)
SUBNET = Subnet("subnet-1", IPv4Network("10.0.1.0/24"), (LOCAL, INTERNET), ALLOW_ALL)
SELF = GroupRule("-1", -1, -1, group_id="sg-1")
EGRESS = GroupRule("-1", -1, -1, ANYWHERE)
SSH = GroupRule("tcp", 22, 22, IPv4Network("203.0.113.10/32"))
GROUP = Group("sg-1", ingress=(SELF, SSH), egress=(SELF, EGRESS))
PRIMARY = Interface(
    "i-1", IPv4Address("10.0.1.4"), IPv4Address("127.64.0.1"), VPC, SUBNET, groups=(GROUP,), metadata=True
)
AUX = replace(PRIMARY, instance_id="i-2", address=IPv4Address("10.0.1.5"), public_address=None)
OPEN = Reachability(security_groups=True, routes=True, network_acls=True)


def judge(
    *interfaces: Interface,
    source: IPv4Address = PRIMARY.address,
    to: IPv4Address = PUBLIC,
    port: int = 443,
    protocol: int = TCP,
) -> Reachability:
    return reachability(Network(interfaces), Flow("vpc-1", protocol, source, 40000, to, port))


def test_an_online_instance_reaches_the_internet() -> None:
    assert judge(PRIMARY) == OPEN
    assert judge(PRIMARY, protocol=UDP, port=53) == OPEN
    assert judge(PRIMARY, protocol=ICMP, port=8) == OPEN
    assert judge(PRIMARY, source=CONTROLLER, to=PRIMARY.address, port=22) == OPEN


def test_a_group_without_egress_alone_blocks_the_internet() -> None:
    offline = replace(PRIMARY, groups=(replace(GROUP, egress=(SELF,)),))
    assert judge(offline) == replace(OPEN, security_groups=False)


def test_a_missing_route_alone_blocks_the_internet() -> None:
    offline = replace(PRIMARY, subnet=replace(SUBNET, routes=(LOCAL, replace(INTERNET, internet=False))))
    assert judge(offline) == replace(OPEN, routes=False)
    offline = replace(PRIMARY, subnet=replace(SUBNET, routes=(LOCAL,)))
    assert judge(offline) == replace(OPEN, routes=False)


@pytest.mark.parametrize("egress", [True, False])
def test_an_acl_alone_blocks_the_internet_both_ways(egress: bool) -> None:
    deny = AclEntry(50, egress, False, -1, ANYWHERE, -1, -1)
    offline = replace(PRIMARY, subnet=replace(SUBNET, acl=(*ALLOW_ALL, deny)))
    assert judge(offline) == replace(OPEN, network_acls=False)


def test_an_acl_without_entries_denies() -> None:
    assert not judge(replace(PRIMARY, subnet=replace(SUBNET, acl=()))).network_acls


def test_an_acl_must_allow_the_ephemeral_ports_of_replies() -> None:
    only_ssh = (
        AclEntry(100, False, True, TCP, IPv4Network("203.0.113.10/32"), 22, 22),
        AclEntry(100, True, True, TCP, IPv4Network("203.0.113.10/32"), 1024, 65535),
    )
    machine = replace(PRIMARY, subnet=replace(SUBNET, acl=only_ssh))
    assert judge(machine, source=CONTROLLER, to=machine.address, port=22) == OPEN
    assert not judge(machine).network_acls
    deaf = replace(PRIMARY, subnet=replace(SUBNET, acl=only_ssh[:1]))
    assert not judge(deaf, source=CONTROLLER, to=deaf.address, port=22).network_acls


def test_no_public_address_means_no_internet_either_way() -> None:
    assert judge(AUX, source=AUX.address) == replace(OPEN, routes=False)
    assert judge(AUX, source=CONTROLLER, to=AUX.address, port=22) == replace(OPEN, routes=False)


def test_only_the_controller_can_connect_and_only_to_port_22() -> None:
    assert not judge(PRIMARY, source=CONTROLLER, to=PRIMARY.address, port=23).security_groups
    stranger = IPv4Address("203.0.113.11")
    assert not judge(PRIMARY, source=stranger, to=PRIMARY.address, port=22).security_groups


def test_a_route_to_the_controller_allows_only_its_connections() -> None:
    routes = (LOCAL, replace(INTERNET, network=IPv4Network("203.0.113.10/32")))
    offline = replace(PRIMARY, subnet=replace(SUBNET, routes=routes))
    assert judge(offline, source=CONTROLLER, to=offline.address, port=22) == OPEN
    assert judge(offline) == replace(OPEN, routes=False)


def test_the_most_specific_route_decides() -> None:
    nowhere = Route(IPv4Network("198.51.100.0/24"), local=False, internet=False)
    machine = replace(PRIMARY, subnet=replace(SUBNET, routes=(LOCAL, INTERNET, nowhere)))
    assert not judge(machine).routes
    assert judge(machine, to=IPv4Address("192.0.2.1")) == OPEN


def test_members_of_a_group_reach_each_other_on_all_ports() -> None:
    for protocol, port in ((TCP, 1), (TCP, 65535), (UDP, 5000), (ICMP, 8)):
        assert judge(PRIMARY, AUX, to=AUX.address, port=port, protocol=protocol) == OPEN
        assert judge(PRIMARY, AUX, source=AUX.address, to=PRIMARY.address, port=port, protocol=protocol) == OPEN


def test_instances_of_different_groups_do_not_reach_each_other() -> None:
    own = GroupRule("-1", -1, -1, group_id="sg-2")
    stranger = replace(AUX, groups=(Group("sg-2", ingress=(own,), egress=(own,)),))
    assert judge(PRIMARY, stranger, to=AUX.address) == replace(OPEN, security_groups=False)
    assert judge(PRIMARY, stranger, source=AUX.address, to=PRIMARY.address) == replace(OPEN, security_groups=False)


def test_an_address_without_an_instance_is_unreachable() -> None:
    assert not judge(PRIMARY, to=IPv4Address("10.0.9.9")).routes


def test_acls_apply_between_subnets_but_not_within_one() -> None:
    closed = replace(SUBNET, acl=())
    assert judge(replace(PRIMARY, subnet=closed), replace(AUX, subnet=closed), to=AUX.address) == OPEN
    elsewhere = replace(AUX, subnet=replace(closed, id="subnet-2"))
    assert judge(PRIMARY, elsewhere, to=AUX.address) == replace(OPEN, network_acls=False)


def test_an_allowlisted_destination_has_its_port_only() -> None:
    rule = GroupRule("tcp", 443, 443, IPv4Network("198.51.100.7/32"))
    machine = replace(PRIMARY, groups=(replace(GROUP, egress=(SELF, rule)),))
    assert judge(machine) == OPEN
    assert not judge(machine, port=444).open
    assert not judge(machine, protocol=UDP).open
    assert not judge(machine, to=IPv4Address("198.51.100.8")).open


def test_the_resolver_answers_unless_the_vpc_disables_it() -> None:
    closed = replace(AUX, groups=(), subnet=replace(SUBNET, routes=(), acl=()))
    off = replace(closed, vpc=replace(VPC, dns_support=False))
    for address in ("169.254.169.253", "10.0.0.2"):
        assert answers_dns(closed, IPv4Address(address))
        assert not answers_dns(off, IPv4Address(address))
    assert not answers_dns(closed, IPv4Address("10.0.1.2"))
