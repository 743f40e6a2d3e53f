"""Tests the comparison of what EC2's API describes with what the permission calls for, without an account."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from provisioner.base.errors import MachineLostError
from provisioner.base.models import Endpoint, Environment
from provisioner.clouds.aws import cleanup
from provisioner.clouds.aws.account import Account
from provisioner.clouds.aws.api import ENVIRONMENT_TAG
from provisioner.clouds.aws.isolation import AwsIsolation, Seen, compare, require_running
from provisioner.clouds.aws.network import Network
from tests.unit.fakes.world import environment

CONTROLLER = "203.0.113.10/32"
NETWORK = Network(
    home="home",
    owner="me",
    vpcs={"online": "vpc-on", "offline": "vpc-off"},
    gateways={"online": "igw-on", "offline": "igw-off"},
    subnets={"online": {}, "offline": {}},
    controllers=frozenset([CONTROLLER]),
    parts={},
    numbers={CONTROLLER: 100},
    seen={},
    taken=(),
)
RECORD = environment(endpoints={"primary": Endpoint(host="198.51.100.1", port=22, instance_id="i-1")})
OURS = [{"Key": ENVIRONMENT_TAG, "Value": RECORD.id}]
NEIGHBOURS = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "sg-1"}]}
SSH = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": CONTROLLER}]}
GROUP: dict[str, Any] = {
    "GroupId": "sg-1",
    "Tags": OURS,
    "IpPermissions": [NEIGHBOURS, SSH],
    "IpPermissionsEgress": [NEIGHBOURS],
}
INTERFACE = {
    "NetworkInterfaceId": "eni-1", "SourceDestCheck": True, "Ipv6Addresses": [], "PrivateIpAddresses": [{}],
    "Groups": [{"GroupId": "sg-1"}],
}  # fmt: skip
INSTANCE = {
    "InstanceId": "i-1", "State": {"Name": "running"}, "VpcId": "vpc-off", "NetworkInterfaces": [INTERFACE],
    "PublicIpAddress": "198.51.100.1",
    "MetadataOptions": {"HttpEndpoint": "disabled", "State": "applied"},
}  # fmt: skip
LOCAL = {"DestinationCidrBlock": "10.215.0.0/16", "GatewayId": "local"}
TO_CONTROLLER = {"DestinationCidrBlock": CONTROLLER, "GatewayId": "igw-off"}


def entry(cidr: str, protocol: str = "-1", first: int = 0, last: int = 0, *, egress: bool) -> dict[str, Any]:
    ports = {"PortRange": {"From": first, "To": last}} if protocol != "-1" else {}
    return {"CidrBlock": cidr, "Protocol": protocol, "Egress": egress, "RuleAction": "allow", **ports}


ENTRIES = [
    entry("10.215.0.0/16", egress=False),
    entry("10.215.0.0/16", egress=True),
    entry(CONTROLLER, "6", 22, 22, egress=False),
    entry(CONTROLLER, "6", 1024, 65535, egress=True),
    {"CidrBlock": "0.0.0.0/0", "Protocol": "-1", "Egress": True, "RuleAction": "deny"},
]
SEEN = Seen(
    instances=(INSTANCE,),
    groups=(GROUP,),
    members=frozenset(["eni-1"]),
    tables=({"Routes": [LOCAL, TO_CONTROLLER]},),
    acls=({"Entries": ENTRIES},),
    resolver=False,
)


def with_instance(**changes: Any) -> Seen:
    return replace(SEEN, instances=({**INSTANCE, **changes},))


def with_interface(**changes: Any) -> Seen:
    return with_instance(NetworkInterfaces=[{**INTERFACE, **changes}])


def with_route(**route: str) -> Seen:
    return replace(SEEN, tables=({"Routes": [LOCAL, TO_CONTROLLER, route]},))


def with_rule(way: str, **rule: Any) -> Seen:
    return replace(SEEN, groups=({**GROUP, way: [*GROUP[way], {"IpProtocol": "-1", **rule}]},))


def test_a_network_as_it_should_be_has_no_differences() -> None:
    assert compare(SEEN, RECORD, NETWORK) == []


def test_a_controller_that_joined_the_network_is_no_orphan() -> None:
    other = "198.51.100.9/32"
    entries = [*ENTRIES, entry(other, "6", 22, 22, egress=False), entry(other, "6", 1024, 65535, egress=True)]
    route = {"DestinationCidrBlock": other, "GatewayId": "igw-off"}
    seen = replace(SEEN, tables=({"Routes": [LOCAL, TO_CONTROLLER, route]},), acls=({"Entries": entries},))
    joined = NETWORK.model_copy(update={"controllers": NETWORK.controllers | {other}})
    assert compare(seen, RECORD, joined) == []
    assert compare(seen, RECORD, NETWORK) == [f"the route table has: {other} by igw-off"]
    assert compare(replace(seen, acls=SEEN.acls), RECORD, joined) == [
        f"the network ACL lacks: in tcp 22 from {other}",
        f"the network ACL lacks: out tcp 1024-65535 to {other}",
    ]


DIFFERENT: dict[str, tuple[Seen, str]] = {
    "another-vpc": (with_instance(VpcId="vpc-on"), "in another VPC"),
    "profile": (with_instance(IamInstanceProfile={}), "instance profile"),
    "metadata": (with_instance(MetadataOptions={"HttpEndpoint": "enabled"}), "metadata service on"),
    "metadata-pending": (
        with_instance(MetadataOptions={"HttpEndpoint": "disabled", "State": "pending"}),
        "metadata service on",
    ),
    "two-cards": (with_instance(NetworkInterfaces=[INTERFACE, INTERFACE]), "one network interface"),
    "stranger": (replace(SEEN, instances=(INSTANCE, {**INSTANCE, "InstanceId": "i-2"})), "other instances"),
    "missing": (replace(SEEN, instances=()), "other instances"),
    "forwards": (with_interface(SourceDestCheck=False), "forwards packets"),
    "ipv6-address": (with_interface(Ipv6Addresses=[{}]), "IPv6 addresses"),
    "addresses": (with_interface(PrivateIpAddresses=[{}, {}]), "further addresses"),
    "second-group": (with_interface(Groups=[{"GroupId": "sg-1"}, {"GroupId": "sg-2"}]), "one security group"),
    "group-of-others": (replace(SEEN, groups=({**GROUP, "Tags": []},)), "one security group"),
    "member": (replace(SEEN, members=frozenset(["eni-1", "eni-2"])), "other members"),
    "ipv6-rule": (with_rule("IpPermissionsEgress", Ipv6Ranges=[{"CidrIpv6": "::/0"}]), "out all to ::/0"),
    "list-rule": (with_rule("IpPermissionsEgress", PrefixListIds=[{"PrefixListId": "pl-1"}]), "out all to pl-1"),
    "group-rule": (with_rule("IpPermissions", UserIdGroupPairs=[{"GroupId": "sg-2"}]), "in all from sg-2"),
    "wide-ingress": (with_rule("IpPermissions", IpRanges=[{"CidrIp": "0.0.0.0/0"}]), "in all from 0.0.0.0/0"),
    "endpoint": (with_route(DestinationPrefixListId="pl-s3", GatewayId="vpce-1"), "has: pl-s3 by vpce-1"),
    "peering": (with_route(DestinationCidrBlock="10.0.0.0/8", VpcPeeringConnectionId="pcx-1"), "by pcx-1"),
    "ipv6-route": (with_route(DestinationIpv6CidrBlock="::/0", GatewayId="igw-off"), "the route to ::/0 is too wide"),
    "no-table": (replace(SEEN, tables=()), "0 route tables"),
    "no-acl": (replace(SEEN, acls=()), "0 network ACLs"),
    "resolver": (replace(SEEN, resolver=True), "resolver is on"),
}


@pytest.mark.parametrize(("seen", "expected"), DIFFERENT.values(), ids=DIFFERENT)
def test_each_difference_is_named(seen: Seen, expected: str) -> None:
    assert any(expected in difference for difference in compare(seen, RECORD, NETWORK))


def test_an_offline_aux_vm_has_no_public_address() -> None:
    aux: Environment = RECORD.model_copy(update={"endpoints": {"aux": RECORD.endpoints["primary"]}})
    assert compare(SEEN, aux, NETWORK) == ["the aux machine has a public address"]


def test_a_machine_that_is_ending_is_lost_and_not_a_hole() -> None:
    require_running(SEEN.instances, RECORD)
    for state in ("shutting-down", "stopping", "stopped"):
        with pytest.raises(MachineLostError, match=f"i-1 is {state}"):
            require_running([{**INSTANCE, "State": {"Name": state}}], RECORD)
    with pytest.raises(MachineLostError, match="i-1 is gone"):
        require_running((), RECORD)
    # Another instance with its tag is no reason to try again.
    other = {**INSTANCE, "InstanceId": "i-2", "State": {"Name": "pending"}}
    require_running((INSTANCE, other), RECORD)


def test_a_spot_interruption_after_the_probes_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = {**INSTANCE, "State": {"Name": "shutting-down"}, "NetworkInterfaces": []}
    monkeypatch.setattr(cleanup, "instances", lambda *_: [ending])
    cloud = AwsIsolation()
    cloud.account = cast("Account", SimpleNamespace(api=None))
    with pytest.raises(MachineLostError):
        cloud.isolation_differences(RECORD.model_copy(update={"placement": {"region": "eu-west-1"}}))
