"""A controller whose address has changed reaches the machines that it left running, and no other host does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from provisioner.base.config import Settings
from provisioner.base.errors import HostError
from provisioner.base.models import Destination, Environment
from provisioner.clouds.aws import account as account_module
from provisioner.clouds.aws import catalogue
from provisioner.clouds.aws.cloud import AwsCloud
from provisioner.machines import claims
from provisioner.machines.connect import authorize
from provisioner.machines.create import create_machines, create_shared_network
from provisioner.machines.destroy import destroy_machines
from provisioner.session import Session
from tests.aws.account import CONTROLLER, Account, MakeEnvironment
from tests.aws.proxy import Fault, FaultyApi

REGION, OTHER_REGION, THIRD_REGION = "us-west-2", "us-east-2", "us-west-1"
MOVED = "192.0.2.77/32"
# These machines are not hardened.
UNHARDENED = ["the primary machine has its metadata service on"]
ALLOWED = (Destination(cidr="198.51.100.7/32", port=443),)


def opened(account: Account, address: str, region: str = REGION) -> Session:
    return account.session(regions=(region,), controller_cidrs=(address,))


@pytest.fixture(params=[REGION])
def at_home(account: Account, request: pytest.FixtureRequest) -> Iterator[Session]:
    """A controller at its first address, whose environments are destroyed at the end."""
    session = opened(account, CONTROLLER, request.param)
    yield session
    for environment in session.environments.all():
        destroy_machines(session, environment)


def around(account: Account, environment: Environment) -> dict[str, Any]:
    """Who reaches an environment's machines by SSH, layer by layer."""
    ec2 = account.client(region=environment.placement["region"])
    name = environment.endpoints["primary"].instance_id
    [instance] = ec2.describe_instances(InstanceIds=[name])["Reservations"][0]["Instances"]
    of_subnet = [{"Name": "association.subnet-id", "Values": [instance["SubnetId"]]}]
    [group] = ec2.describe_security_groups(GroupIds=[instance["SecurityGroups"][0]["GroupId"]])["SecurityGroups"]
    [table] = ec2.describe_route_tables(Filters=of_subnet)["RouteTables"]
    [acl] = ec2.describe_network_acls(Filters=of_subnet)["NetworkAcls"]
    ports = {22: "in", 1024: "out"}
    return {
        "group": {row["CidrIp"] for rule in group["IpPermissions"] for row in rule["IpRanges"]},
        "routes": {row["DestinationCidrBlock"] for row in table["Routes"] if row["GatewayId"].startswith("igw-")},
        "acl": {
            f"{ports[first]} {row['CidrBlock']}"
            for row in acl["Entries"]
            if (first := row.get("PortRange", {}).get("From")) in ports and row["RuleNumber"] < 200
        },
    }


def test_every_layer_admits_the_new_address(account: Account, at_home: Session, environment: MakeEnvironment) -> None:
    wanted = [environment(at_home, aux=False, stack="both", allowed=allowed) for allowed in ((), ALLOWED)]
    records = create_machines(at_home, wanted)
    before = [around(account, record) for record in records]
    for record in records:
        authorize(at_home, record)
    assert [around(account, record) for record in records] == before  # no controller has moved
    moved = opened(account, MOVED)
    for record, then in zip(records, before, strict=True):
        for _ in range(2):
            authorize(moved, record)
            assert around(account, record) == {
                "group": then["group"] | {MOVED},
                "routes": then["routes"] | {MOVED},
                "acl": then["acl"] | {f"in {MOVED}", f"out {MOVED}"},
            }
        assert moved.cloud.isolation_differences(record) == UNHARDENED
    assert any("address has changed" in note for note in account.progress.notes)


def test_what_has_been_admitted_already_is_no_error(
    account: Account, api: FaultyApi, at_home: Session, environment: MakeEnvironment
) -> None:
    [record] = create_machines(at_home, [environment(at_home, aux=False, allowed=ALLOWED)])
    then, moved = around(account, record), opened(account, MOVED)
    create_shared_network(moved, record)
    faults = [
        api.inject(Fault("AuthorizeSecurityGroupIngress", "InvalidPermission.Duplicate", done=True)),
        api.inject(Fault("CreateRoute", "RouteAlreadyExists", done=True)),
    ]
    authorize(moved, record)
    assert all(fault.hits for fault in faults)
    assert around(account, record)["group"] == then["group"] | {MOVED}


@pytest.mark.parametrize("at_home", [THIRD_REGION], indirect=True)  # where no other controller has come
def test_an_acl_without_room_forgets_the_oldest_address(
    account: Account, at_home: Session, environment: MakeEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = catalogue.shipped  # without prices there
    monkeypatch.setattr(catalogue, "shipped", lambda _: shipped("us-east-1"))
    many = tuple(Destination(cidr=f"198.51.100.{number}/32", port=443) for number in range(1, 19))
    [record] = create_machines(at_home, [environment(at_home, aux=False, allowed=many)])
    moved = opened(account, MOVED, THIRD_REGION)
    for _ in range(2):
        authorize(moved, record)
        then = around(account, record)
        assert then["acl"] == {f"in {MOVED}", f"out {MOVED}"}
        assert then["routes"] == {MOVED, *(destination.cidr for destination in many)}
        assert then["group"] >= {MOVED}
    assert moved.cloud.isolation_differences(record) == UNHARDENED


@pytest.mark.parametrize("at_home", [OTHER_REGION], indirect=True)  # its network is another test's
def test_a_renewal_of_the_lease_notices(
    account: Account, at_home: Session, environment: MakeEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    [record] = create_machines(at_home, [environment(at_home, aux=False, full_internet=True)])
    moved = opened(account, MOVED, OTHER_REGION)
    renewals = []
    monkeypatch.setattr(moved.leases, "take", lambda _id, _path, renew: renewals.append(renew))
    claims.take_lease(moved, record)
    [renew] = renewals
    renew()
    assert around(account, record)["group"] == {CONTROLLER, MOVED}
    assert moved.cloud.isolation_differences(record) == UNHARDENED


def test_the_own_address_is_looked_up_again(account: Account, api: FaultyApi, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[frozenset[str] | HostError] = [frozenset([CONTROLLER]), HostError("no answer"), frozenset([MOVED])]

    def look(_: tuple[str, ...]) -> frozenset[str]:
        answer = answers.pop(0)
        if isinstance(answer, HostError):
            raise answer
        return answer

    monkeypatch.setattr(account_module, "controller_networks", look)
    cloud = AwsCloud(account.session().home, Settings(), (REGION,))
    assert {cloud.account.controllers for _ in range(5)} == {frozenset([CONTROLLER])}
    monkeypatch.setattr(account_module, "LOOK_UP_SECONDS", -1e9)
    cloud.account._look_up_at = 0.0
    assert [cloud.account.controllers, cloud.account.controllers] == [frozenset([CONTROLLER]), frozenset([MOVED])]
