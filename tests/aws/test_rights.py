"""Tests that the account of these tests obeys the printed policy: real calls, as boto3 writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from provisioner.clouds.aws.schedules import role_arn
from tests.aws.account import AMI, REGION, Account
from tests.aws.proxy import FaultyApi
from tests.aws.rights.requests import ACCOUNT

OURS = [{"Key": "provisioner:owner", "Value": "me"}]


def test_calls_against_the_rest_of_the_account_are_refused(api: FaultyApi, account: Account) -> None:
    inspector = account.client()
    theirs = inspector.create_vpc(CidrBlock="10.1.0.0/16")["Vpc"]["VpcId"]
    subnet = inspector.create_subnet(VpcId=theirs, CidrBlock="10.1.0.0/24")["Subnet"]["SubnetId"]
    [acl] = inspector.describe_network_acls(Filters=[{"Name": "vpc-id", "Values": [theirs]}])["NetworkAcls"]
    association = acl["Associations"][0]["NetworkAclAssociationId"]
    ec2, scheduler, iam = (boto3.client(service, REGION) for service in ("ec2", "scheduler", "iam"))
    tags = [{"ResourceType": kind, "Tags": OURS} for kind in ("instance", "volume")]
    card = {"DeviceIndex": 0, "SubnetId": subnet, "AssociatePublicIpAddress": False}
    target = {"Arn": "arn:aws:scheduler:::aws-sdk:iam:createAccessKey", "RoleArn": role_arn(ACCOUNT) + "-x"}
    attacks: list[Callable[[], Any]] = [
        lambda: ec2.create_vpc(CidrBlock="10.2.0.0/16"),
        lambda: ec2.create_tags(Resources=[theirs], Tags=OURS),
        lambda: ec2.delete_vpc(VpcId=theirs),
        lambda: ec2.replace_network_acl_association(AssociationId=association, NetworkAclId=acl["NetworkAclId"]),
        lambda: ec2.run_instances(
            ImageId=AMI, MinCount=1, MaxCount=1, NetworkInterfaces=[card], TagSpecifications=tags,
            MetadataOptions={"HttpTokens": "required"},
        ),
        lambda: scheduler.create_schedule(
            Name="x", GroupName="provisioner", ScheduleExpression="rate(1 hour)", Target=target,
            FlexibleTimeWindow={"Mode": "OFF"},
        ),
        lambda: scheduler.delete_schedule_group(Name="provisioner"),
        lambda: iam.attach_role_policy(RoleName="provisioner-scheduler", PolicyArn="arn:aws:iam::aws:policy/Admin"),
        lambda: boto3.client("s3", REGION).get_object(Bucket="secrets", Key="key"),
    ]  # fmt: skip
    for attack in attacks:
        with pytest.raises(ClientError) as caught:
            attack()
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
    assert len({refusal.partition(" ")[0] for refusal in api.judge.refused}) == len(attacks)
    api.judge.refused.clear()
    inspector.delete_subnet(SubnetId=subnet)
    inspector.delete_vpc(VpcId=theirs)
