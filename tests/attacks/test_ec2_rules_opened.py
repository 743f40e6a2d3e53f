"""A user with rights in the AWS account opens a way out after Terraform's apply, before the task starts.

A guest could hide the open way by answering the probes as expected. What EC2's API says is read back, and each change
to the security group, the routes, the network ACL or the machines is a difference that fails the environment.
"""
# ruff: noqa: F811 - fixtures of the tests on AWS are used by their names

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from provisioner.base.models import Destination, Environment
from provisioner.clouds.aws import isolation
from provisioner.machines.create import create_machines
from provisioner.machines.destroy import destroy_machines
from provisioner.session import Session
from tests.aws.account import NOTHING, Account, MakeEnvironment
from tests.aws.conftest import account, api, environment  # noqa: F401
from tests.aws.proxy import FaultyApi

pytestmark = pytest.mark.campaign

ANYWHERE = "0.0.0.0/0"
ALLOWED = (Destination(cidr="198.51.100.7/32", port=443), Destination(cidr="192.0.2.0/24", port=8080))


class Ec2:
    """The account, and the environment's resources in it."""

    def __init__(self, account: Account, running: Environment) -> None:
        self.client: Any = account.client()
        self.instances = {role: endpoint.instance_id for role, endpoint in running.endpoints.items()}
        reservations = self.client.describe_instances(InstanceIds=list(self.instances.values()))["Reservations"]
        described = [instance for row in reservations for instance in row["Instances"]]
        self.primary = next(row for row in described if row["InstanceId"] == self.instances["primary"])
        [self.interface] = self.primary["NetworkInterfaces"]
        self.group = self.interface["Groups"][0]["GroupId"]
        of_subnet = [{"Name": "association.subnet-id", "Values": [self.primary["SubnetId"]]}]
        [self.table] = self.client.describe_route_tables(Filters=of_subnet)["RouteTables"]
        [self.acl] = self.client.describe_network_acls(Filters=of_subnet)["NetworkAcls"]
        self.gateway = next(
            row["GatewayId"] for row in self.table["Routes"] if row.get("GatewayId", "").startswith("igw-")
        )

    def rule(self, cidr: str, protocol: str = "-1", **ports: int) -> dict[str, Any]:
        rule = {"IpProtocol": protocol, "IpRanges": [{"CidrIp": cidr}], **ports}
        return {"GroupId": self.group, "IpPermissions": [rule]}

    def entry(self, *, egress: bool) -> dict[str, Any]:
        return {"NetworkAclId": self.acl["NetworkAclId"], "RuleNumber": 10, "Egress": egress}


Change = Callable[[Ec2], tuple[Callable[[], Any], Callable[[], Any]]]


def _group_out(ec2: Ec2) -> tuple[Callable[[], Any], Callable[[], Any]]:
    rule = ec2.rule(ANYWHERE)
    return (
        lambda: ec2.client.authorize_security_group_egress(**rule),
        lambda: ec2.client.revoke_security_group_egress(**rule),
    )


def _group_in(ec2: Ec2) -> tuple[Callable[[], Any], Callable[[], Any]]:
    rule = ec2.rule(ANYWHERE, "tcp", FromPort=22, ToPort=22)
    return (
        lambda: ec2.client.authorize_security_group_ingress(**rule),
        lambda: ec2.client.revoke_security_group_ingress(**rule),
    )


def _route(cidr: str) -> Change:
    def change(ec2: Ec2) -> tuple[Callable[[], Any], Callable[[], Any]]:
        where = {"RouteTableId": ec2.table["RouteTableId"], "DestinationCidrBlock": cidr}
        return (
            lambda: ec2.client.create_route(**where, GatewayId=ec2.gateway),
            lambda: ec2.client.delete_route(**where),
        )

    return change


def _entry(ec2: Ec2) -> tuple[Callable[[], Any], Callable[[], Any]]:
    entry = ec2.entry(egress=True)
    return (
        lambda: ec2.client.create_network_acl_entry(**entry, Protocol="-1", RuleAction="allow", CidrBlock=ANYWHERE),
        lambda: ec2.client.delete_network_acl_entry(**entry),
    )


def _resolver(ec2: Ec2) -> tuple[Callable[[], Any], Callable[[], Any]]:
    vpc = ec2.primary["VpcId"]
    return (
        lambda: ec2.client.modify_vpc_attribute(VpcId=vpc, EnableDnsSupport={"Value": True}),
        lambda: ec2.client.modify_vpc_attribute(VpcId=vpc, EnableDnsSupport={"Value": False}),
    )


def _metadata(ec2: Ec2) -> tuple[Callable[[], Any], Callable[[], Any]]:
    instance = ec2.instances["primary"]

    def switch(state: str) -> Callable[[], Any]:
        return lambda: ec2.client.modify_instance_metadata_options(InstanceId=instance, HttpEndpoint=state)

    return switch("enabled"), switch("disabled")


def _forwarding(ec2: Ec2) -> tuple[Callable[[], Any], Callable[[], Any]]:
    interface = ec2.interface["NetworkInterfaceId"]

    def switch(value: bool) -> Callable[[], Any]:
        return lambda: ec2.client.modify_network_interface_attribute(
            NetworkInterfaceId=interface, SourceDestCheck={"Value": value}
        )

    return switch(False), switch(True)


def _member(ec2: Ec2) -> tuple[Callable[[], Any], Callable[[], Any]]:
    made: list[str] = []

    def join() -> None:
        subnet = ec2.primary["SubnetId"]
        row = ec2.client.create_network_interface(SubnetId=subnet, Groups=[ec2.group])["NetworkInterface"]
        made.append(row["NetworkInterfaceId"])

    return join, lambda: ec2.client.delete_network_interface(NetworkInterfaceId=made[0])


CHANGES: dict[str, tuple[Change, str]] = {
    "group-out": (_group_out, "the security group has: out all to 0.0.0.0/0"),
    "group-in": (_group_in, "the security group has: in tcp 22 from 0.0.0.0/0"),
    "default-route": (_route(ANYWHERE), "the route to 0.0.0.0/0 is too wide"),
    "extra-route": (_route("8.8.8.0/24"), "8.8.8.0/24"),
    "acl": (_entry, "the network ACL has: out all to 0.0.0.0/0"),
    "resolver": (_resolver, "the VPC's resolver is on"),
    "metadata": (_metadata, "the primary machine has its metadata service on"),
    "forwarding": (_forwarding, "the primary machine forwards packets of others"),
    "member": (_member, "its security group has other members than its machines"),
}


def _harden(account: Account, running: Environment) -> None:
    """Does what the boot does: no real machine boots here."""
    for endpoint in running.endpoints.values():
        account.client().modify_instance_metadata_options(InstanceId=endpoint.instance_id, HttpEndpoint="disabled")


def _created(session: Session, account: Account, planned: Environment) -> Environment:
    [running] = create_machines(session, [planned])
    _harden(account, running)
    return running


@pytest.mark.parametrize("allowed", [(), ALLOWED], ids=["offline", "allowlist"])
def test_whatever_is_opened_after_the_apply_is_a_difference(
    api: FaultyApi,
    account: Account,
    environment: MakeEnvironment,
    monkeypatch: pytest.MonkeyPatch,
    allowed: tuple[Destination, ...],
) -> None:
    monkeypatch.setattr(isolation, "PAUSE_SECONDS", 0)
    session = account.session()
    running = _created(session, account, environment(session, allowed=allowed))
    try:
        assert session.cloud.isolation_differences(running) == []
        ec2 = Ec2(account, running)
        unseen = []
        for name, (change, expected) in CHANGES.items():
            do, undo = change(ec2)
            do()
            api.new.reset()  # EC2 shows it by now
            differences = session.cloud.isolation_differences(running)
            undo()
            if not any(expected in difference for difference in differences):
                unseen.append((name, differences))
        assert unseen == []
        assert session.cloud.isolation_differences(running) == []
    finally:
        destroy_machines(session, running)
    assert account.everything() == NOTHING


def test_an_online_environment_differs_only_in_its_permission(
    account: Account, environment: MakeEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "PAUSE_SECONDS", 0)
    session = account.session()
    running = _created(session, account, environment(session, full_internet=True))
    try:
        assert session.cloud.isolation_differences(running) == []
        ec2 = Ec2(account, running)
        do, undo = _group_in(ec2)
        do()
        assert session.cloud.isolation_differences(running) == [CHANGES["group-in"][1]]
        undo()
        # An online network around an environment that was promised none.
        offline = running.model_copy(update={"full_internet": False})
        assert "the security group has: out all to 0.0.0.0/0" in session.cloud.isolation_differences(offline)
    finally:
        destroy_machines(session, running)
    assert account.everything() == NOTHING
