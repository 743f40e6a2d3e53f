"""Attack: one home of an account makes its network anew, while another home's machines run in it.

Nothing that others use may go: neither the network around their machines, nor the schedules that end them in time, nor
the role of these schedules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws

from provisioner.base.errors import HostError, InfrastructureError
from provisioner.clouds.aws import schedules, setup
from provisioner.clouds.aws.api import Api
from provisioner.clouds.aws.network import remove_network
from tests.aws.moto_gaps import close_gaps
from tests.aws.rights.requests import ACCOUNT

REGION = "eu-west-1"
OURS, THEIRS = "home-a", "home-b"
AT = {"ScheduleExpression": "at(2030-01-01T00:00:00)", "FlexibleTimeWindow": {"Mode": "OFF"}}


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """Provides an account with the role, in which the other home's schedule waits."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    close_gaps()
    with mock_aws():
        opened = Api(None, REGION)
        setup.set_up(opened.client("iam"), ACCOUNT)
        schedules.require_group(opened, REGION)
        target = {"Arn": "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances", "RoleArn": schedules.role_arn(ACCOUNT)}
        opened.client("scheduler").create_schedule(Name="theirs", GroupName=schedules.GROUP, Target=target, **AT)
        yield opened


def tags(kind: str, home: str, **more: str) -> list[dict[str, Any]]:
    values = {"provisioner:network": REGION, "provisioner:home": home, "provisioner:owner": "me", **more}
    return [{"ResourceType": kind, "Tags": [{"Key": key, "Value": value} for key, value in values.items()]}]


def make_network(home: str) -> tuple[str, str]:
    """Makes an offline VPC as terraform/aws/network does. Returns the ids of its subnet and its network ACL."""
    ec2 = boto3.client("ec2", REGION)
    vpc = ec2.create_vpc(CidrBlock="10.215.0.0/16", TagSpecifications=tags("vpc", home))["Vpc"]["VpcId"]
    gateway = ec2.create_internet_gateway(TagSpecifications=tags("internet-gateway", home))["InternetGateway"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway["InternetGatewayId"], VpcId=vpc)
    cidr = "10.215.0.0/20"
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock=cidr, TagSpecifications=tags("subnet", home))["Subnet"]["SubnetId"]
    acl = ec2.create_network_acl(VpcId=vpc, TagSpecifications=tags("network-acl", home))["NetworkAcl"]["NetworkAclId"]
    [known] = ec2.describe_network_acls(Filters=[{"Name": "association.subnet-id", "Values": [subnet]}])["NetworkAcls"]
    [association] = [one for one in known["Associations"] if one["SubnetId"] == subnet]
    ec2.replace_network_acl_association(AssociationId=association["NetworkAclAssociationId"], NetworkAclId=acl)
    return subnet, acl


def acl_of(subnet: str) -> str:
    filters = [{"Name": "association.subnet-id", "Values": [subnet]}]
    [acl] = boto3.client("ec2", REGION).describe_network_acls(Filters=filters)["NetworkAcls"]
    return str(acl["NetworkAclId"])


def vpcs_of(home: str) -> int:
    filters = [{"Name": "tag:provisioner:home", "Values": [home]}]
    return len(boto3.client("ec2", REGION).describe_vpcs(Filters=filters)["Vpcs"])


def assert_time_limits_hold(api: Api) -> None:
    assert list(schedules.names(api, REGION)) == ["theirs"]
    schedules.require_role(api, ACCOUNT)


def test_removing_a_network_keeps_other_time_limits(api: Api) -> None:
    make_network(OURS)
    remove_network(api, REGION, OURS)
    assert vpcs_of(OURS) == 0
    assert_time_limits_hold(api)
    remove_network(api, REGION, OURS)  # once more, with nothing left
    assert_time_limits_hold(api)


@pytest.mark.parametrize("used_by", ["machine", "group", "subnet"])
def test_a_network_in_use_is_not_even_begun_with(api: Api, used_by: str) -> None:
    subnet, acl = make_network(OURS)
    ec2 = boto3.client("ec2", REGION)
    [known] = ec2.describe_subnets(SubnetIds=[subnet])["Subnets"]
    if used_by == "machine":
        ec2.create_network_interface(SubnetId=subnet)
    elif used_by == "group":
        ec2.create_security_group(GroupName="e-1", Description="theirs", VpcId=known["VpcId"])
    else:
        ec2.create_subnet(VpcId=known["VpcId"], CidrBlock="10.215.128.0/28")
    with pytest.raises(InfrastructureError, match="while environments use it"):
        remove_network(api, REGION, OURS)
    # Their machines still have each layer around them.
    assert acl_of(subnet) == acl
    assert vpcs_of(OURS) == 1
    assert_time_limits_hold(api)


def test_another_homes_network_stays(api: Api) -> None:
    subnet, acl = make_network(THEIRS)
    remove_network(api, REGION, OURS)
    assert (vpcs_of(THEIRS), acl_of(subnet)) == (1, acl)
    assert_time_limits_hold(api)


def test_without_the_role_nothing_is_begun(api: Api) -> None:
    iam = boto3.client("iam")
    iam.delete_role_policy(RoleName=schedules.ROLE, PolicyName=setup.POLICY)
    iam.delete_role(RoleName=schedules.ROLE)
    with pytest.raises(HostError, match="is not set up") as caught:
        schedules.require_role(api, ACCOUNT)
    assert "provisioner aws setup" in (caught.value.hint or "")
