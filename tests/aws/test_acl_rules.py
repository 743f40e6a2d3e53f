"""Network ACLs hold 20 rules: what does not fit is refused before anything is created, or makes room."""

from __future__ import annotations

from datetime import timedelta

import pytest

from provisioner.base.clock import now
from provisioner.base.errors import HostError, UsageError
from provisioner.base.models import Destination, Environment
from provisioner.clouds.aws import catalogue
from provisioner.clouds.aws.api import Api
from provisioner.clouds.aws.network import Network, find_network
from provisioner.machines.create import create_machines, create_shared_network
from provisioner.machines.destroy import destroy_machines
from tests.aws.account import Account, MakeEnvironment
from tests.aws.proxy import Fault, FaultyApi

REGION = "ca-central-1"


def destinations(count: int) -> tuple[Destination, ...]:
    return tuple(Destination(cidr=f"198.51.100.{number}/32", port=443) for number in range(1, count + 1))


def controllers(first: int, count: int) -> tuple[str, ...]:
    return tuple(f"192.0.2.{number}/32" for number in range(first, first + count))


def joined(account: Account, *own: str, region: str = REGION) -> Network:
    """Lets a controller with these networks in, and returns the region's network as it is then."""
    session = account.session(regions=(region,), controller_cidrs=own)
    create_shared_network(session, account.record(session, region))
    network = find_network(Api(None, region), region, "")
    assert network
    return network


def test_an_allowlist_that_no_acl_holds_is_refused(api: FaultyApi, account: Account) -> None:
    cloud = account.session(regions=("sa-east-1",)).cloud
    cloud.check_allowlist(destinations(18))
    with pytest.raises(UsageError, match="needs 21 rules, and the account's quota is 20") as caught:
        cloud.check_allowlist(destinations(19))
    assert "Service Quotas" in (caught.value.hint or "")
    # Without the right to ask, the default counts.
    fault = api.inject(Fault("POST /", "AccessDeniedException", when=lambda request: not request))
    with pytest.raises(UsageError, match="quota is 20"):
        cloud.check_allowlist(destinations(19))
    assert fault.hits


def test_controllers_join_a_network_without_renumbering(api: FaultyApi, account: Account) -> None:
    first = joined(account, *controllers(20, 2))
    assert set(first.numbers) == first.controllers == set(controllers(20, 2))
    full = joined(account, *controllers(1, 16))
    assert len(full.controllers) == 18
    assert first.numbers.items() < full.numbers.items()
    ec2 = account.client(region=REGION)
    group = ec2.create_security_group(VpcId=full.vpcs["online"], GroupName="tests-main-abc", Description="one's")
    api.new.reset()  # EC2 shows it by now
    with pytest.raises(HostError, match="the addresses of 18 controllers, and its network ACL has no room") as caught:
        joined(account, "192.0.2.100/32")
    assert "tests-main-abc" in (caught.value.hint or "")
    ec2.delete_security_group(GroupId=group["GroupId"])
    assert joined(account, "192.0.2.100/32").controllers == {"192.0.2.100/32"}


def test_addresses_that_nobody_uses_are_dropped_after_a_day(api: FaultyApi, account: Account) -> None:
    region = "eu-north-1"
    network = joined(account, *controllers(1, 3), region=region)
    noted = network.seen
    assert set(noted) == set(controllers(1, 3))
    ec2 = account.client(region=region)
    [table] = [
        table["RouteTableId"]
        for table in ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [network.vpcs["offline"]]}])[
            "RouteTables"
        ]
        if len(table["Routes"]) > 1
    ]
    long_ago = [{"Key": f"provisioner:seen:{cidr}", "Value": "2026-01-02T03:04:05Z"} for cidr in controllers(1, 2)]
    ec2.create_tags(Resources=[table], Tags=long_ago)
    group = ec2.create_security_group(VpcId=network.vpcs["online"], GroupName="tests-main-abc", Description="one's")
    rule = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": controllers(1, 1)[0]}]}
    ec2.authorize_security_group_ingress(GroupId=group["GroupId"], IpPermissions=[rule])
    api.new.reset()  # EC2 shows it by now
    # The first lets itself in to a machine, the second is forgotten, the third was seen today.
    after = joined(account, *controllers(9, 1), region=region)
    assert after.controllers == {*controllers(1, 1), *controllers(3, 1), *controllers(9, 1)}
    assert set(after.seen) == after.controllers
    ec2.delete_security_group(GroupId=group["GroupId"])
    # A controller that comes back after half a day is noted again.
    again = joined(account, *controllers(1, 1), region=region)
    assert now() - again.seen[controllers(1, 1)[0]] < timedelta(hours=1)


def numbers(account: Account, environment: Environment, region: str) -> dict[str, int]:
    """The numbers of the rules in an environment's own ACL, by network."""
    filters = [{"Name": "tag:provisioner:environment", "Values": [environment.id]}]
    [acl] = account.client(region=region).describe_network_acls(Filters=filters)["NetworkAcls"]
    return {row["CidrBlock"]: row["RuleNumber"] for row in acl["Entries"] if row["RuleNumber"] < 32767}


def test_a_joining_controller_gets_the_next_acl_number(
    account: Account, environment: MakeEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    region, shipped = "ap-northeast-1", catalogue.shipped
    # The snapshot has no prices there.
    monkeypatch.setattr(catalogue, "shipped", lambda _: shipped("us-east-1"))

    first = account.session(regions=(region,), controller_cidrs=controllers(20, 2))
    [before] = create_machines(first, [environment(first, aux=False, allowed=destinations(2))])
    known = numbers(account, before, region)
    second = account.session(regions=(region,), controller_cidrs=controllers(1, 1))  # which sorts before the others
    [after] = create_machines(second, [environment(second, aux=False, allowed=destinations(1))])
    joined_in = numbers(account, after, region)
    assert [known[cidr] for cidr in controllers(20, 2)] == [100, 101]
    assert joined_in == {controllers(1, 1)[0]: 102, "198.51.100.1/32": 200}  # and nobody else's address
    for created in (after, before):
        destroy_machines(second, created)
