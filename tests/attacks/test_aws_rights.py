"""Attacks by a user who has the daily credentials of a provisioner, and nothing else, on the rest of the account.

The policies that `provisioner aws policy` prints must deny each of them. Calls are written as they go over the wire,
and judged as the calls of the tests in tests/aws are, all of which they must allow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from provisioner.clouds.aws import rights, setup
from tests.aws.rights.calls import Call
from tests.aws.rights.evaluator import Request, allowed
from tests.aws.rights.judge import daily
from tests.aws.rights.requests import ACCOUNT, requests

DAILY = daily("s3://bucket/prefix")
# Room in each policy for what comes.
ROOM_CHARACTERS = 500
ROLE = f"arn:aws:iam::{ACCOUNT}:role/provisioner-scheduler"
OTHER_ROLE = f"arn:aws:iam::{ACCOUNT}:role/administrator"
OUR_TAGS = {"provisioner:owner": "me", "provisioner:environment": "e-1"}


class World:
    """An account in which ids that end in `-1` are ours, those in `-2` other people's, and images `-3` a vendor's."""

    def tags(self, region: str, resource: str) -> Mapping[str, str]:
        return OUR_TAGS if resource.endswith("1") else {"Name": "production"}

    def owner(self, region: str, resource: str) -> str:
        return "136693071363" if resource.endswith("3") else ACCOUNT

    def associated(self, region: str, association: str) -> list[str]:
        number = association[-1]
        return [f"subnet-{number}"] if association.startswith("acl") else [f"rtb-{number}", f"subnet-{number}"]


def tagged(kind: str, number: int = 1) -> dict[str, str]:
    """The parameters that tag a new resource as ours."""
    prefix = f"TagSpecification.{number}."
    return {
        f"{prefix}ResourceType": kind,
        f"{prefix}Tag.1.Key": "provisioner:owner",
        f"{prefix}Tag.1.Value": "me",
    }


LAUNCH = {
    "ImageId": "ami-1", "KeyName": "key1", "MetadataOptions.HttpTokens": "required",
    "NetworkInterface.1.SubnetId": "subnet-1", "NetworkInterface.1.SecurityGroupId.1": "sg-1",
    "NetworkInterface.1.AssociatePublicIpAddress": "false", **tagged("instance"), **tagged("volume", 2),
}  # fmt: skip


def ec2(action: str, **parameters: str) -> Call:
    return Call("ec2", action, {name.replace("__", "."): value for name, value in parameters.items()})


def launch(without: str = "", **changed: str) -> Call:
    parameters = {**LAUNCH, **{name.replace("__", "."): value for name, value in changed.items()}}
    return Call("ec2", "RunInstances", {name: value for name, value in parameters.items() if name != without})


def tags_on(resource: str, key: str, action: str = "CreateTags") -> Call:
    return Call("ec2", action, {"ResourceId.1": resource, "Tag.1.Key": key, "Tag.1.Value": "x"})


def schedule(action: str, group: str = "provisioner", role: str = ROLE) -> Call:
    return Call("scheduler", action, {"Name": "e-1", "GroupName": group, "RoleArn": role})


def iam(action: str, role: str = "provisioner-scheduler") -> Call:
    return Call("iam", action, {"RoleName": role})


def s3(action: str, bucket: str, key: str = "") -> Call:
    return Call("s3", action, {"Bucket": bucket, "Key": key})


PERMITTED = {
    "launch": launch(),
    "launch-vendor": launch(ImageId="ami-3"),
    "launch-spot": launch(InstanceMarketOptions__MarketType="spot"),
    "subnet": Call("ec2", "CreateSubnet", {"VpcId": "vpc-1", **tagged("subnet")}),
    "gateway": ec2("AttachInternetGateway", InternetGatewayId="igw-1", VpcId="vpc-1"),
    "default-acl": ec2("ReplaceNetworkAclAssociation", AssociationId="aclassoc-1", NetworkAclId="acl-2"),
    "cancel-spot": ec2("CancelSpotInstanceRequests", SpotInstanceRequestId__1="sir-2"),
    "lease": tags_on("i-1", "provisioner:lease-until"),
    "seen": tags_on("rtb-1", "provisioner:seen:192.0.2.1/32"),
    "forget": tags_on("rtb-1", "provisioner:seen:192.0.2.1/32", "DeleteTags"),
    "schedule": schedule("CreateSchedule"),
    "state": s3("PutObject", "bucket", "prefix/a/terraform.tfstate"),
}

ATTACKS = {
    # More rights.
    "create-role": iam("CreateRole"),
    "create-other-role": iam("CreateRole", "provisioner-scheduler-x"),
    "put-role-policy": iam("PutRolePolicy"),
    "attach-role-policy": iam("AttachRolePolicy"),
    "change-trust": iam("UpdateAssumeRolePolicy"),
    "delete-role": iam("DeleteRole"),
    "drop-boundary": iam("DeleteRolePermissionsBoundary"),
    "tag-role": iam("TagRole"),
    "create-user": iam("CreateUser"),
    "create-access-key": iam("CreateAccessKey"),
    "new-policy-version": iam("CreatePolicyVersion"),
    "own-policy": iam("PutUserPolicy"),
    "join-group": iam("AddUserToGroup"),
    "service-role": iam("CreateServiceLinkedRole"),
    "make-profile": iam("CreateInstanceProfile"),
    "read-other-role": iam("GetRole", "administrator"),
    "assume-role": Call("sts", "AssumeRole", {}),
    "function-with-role": Call("lambda", "CreateFunction", {}),
    "read-parameters": Call("ssm", "GetParameter", {}),
    "run-command": Call("ssm", "SendCommand", {}),
    # Machines that have more rights, or another owner's data or network.
    "launch-with-profile": launch(IamInstanceProfile__Name="administrator"),
    "launch-with-profile-arn": launch(IamInstanceProfile__Arn="arn:aws:iam::1:instance-profile/x"),
    "profile-later": ec2("AssociateIamInstanceProfile", InstanceId="i-1", IamInstanceProfile__Name="administrator"),
    "launch-foreign-image": launch(ImageId="ami-2"),
    "launch-foreign-subnet": launch(NetworkInterface__1__SubnetId="subnet-2"),
    "launch-foreign-group": launch(NetworkInterface__1__SecurityGroupId__1="sg-2"),
    "launch-second-group": launch(NetworkInterface__1__SecurityGroupId__2="sg-2"),
    "launch-foreign-key": launch(KeyName="key2"),
    "launch-foreign-snapshot": launch(BlockDeviceMapping__1__Ebs__SnapshotId="snap-2"),
    "launch-foreign-card": launch(
        "NetworkInterface.1.AssociatePublicIpAddress", NetworkInterface__1__NetworkInterfaceId="eni-2"
    ),
    "launch-untagged": launch("TagSpecification.1.Tag.1.Key"),
    "launch-untagged-disk": launch("TagSpecification.2.Tag.1.Key"),
    "launch-old-metadata": launch(MetadataOptions__HttpTokens="optional"),
    "launch-template": launch(LaunchTemplate__LaunchTemplateId="lt-2"),
    "launch-second-card": launch(NetworkInterface__2__NetworkInterfaceId="eni-2"),
    "launch-plain-subnet": launch("NetworkInterface.1.AssociatePublicIpAddress"),
    "launch-default-subnet": launch("NetworkInterface.1.SubnetId"),
    "launch-default-group": launch("NetworkInterface.1.SecurityGroupId.1"),
    "launch-group-by-name": launch(SecurityGroup__1="default"),
    "launch-no-image": launch("ImageId"),
    "attach-card": ec2("AttachNetworkInterface", InstanceId="i-1", NetworkInterfaceId="eni-2"),
    "change-card": ec2("ModifyNetworkInterfaceAttribute", NetworkInterfaceId="eni-1", SecurityGroupId__1="sg-1"),
    "attach-disk": ec2("AttachVolume", InstanceId="i-1", VolumeId="vol-2"),
    "copy-disk": ec2("CreateSnapshot", VolumeId="vol-2"),
    "image-of-foreign": Call(
        "ec2", "CreateImage", {"InstanceId": "i-2", **tagged("image"), **tagged("snapshot", 2)}
    ),
    "image-untagged": ec2("CreateImage", InstanceId="i-1"),
    "register-image": ec2("RegisterImage", BlockDeviceMapping__1__Ebs__SnapshotId="snap-2"),
    "share-image": ec2("ModifyImageAttribute", ImageId="ami-1"),
    "share-snapshot": ec2("ModifySnapshotAttribute", SnapshotId="snap-1"),
    "copy-image": ec2("CopyImage", SourceImageId="ami-2"),
    "delete-snapshot": ec2("DeleteSnapshot", SnapshotId="snap-2"),
    "deregister-image": ec2("DeregisterImage", ImageId="ami-2"),
    "delete-volume": ec2("DeleteVolume", VolumeId="vol-2"),
    # Other people's machines.
    "user-data": ec2("ModifyInstanceAttribute", InstanceId="i-2", UserData__Value="x"),
    "read-user-data": ec2("DescribeInstanceAttribute", InstanceId="i-2", Attribute="userData"),
    "foreign-group-on-ours": ec2("ModifyInstanceAttribute", InstanceId="i-1", GroupId__1="sg-2"),
    "terminate": ec2("TerminateInstances", InstanceId__1="i-2"),
    "terminate-unknown": ec2("TerminateInstances", InstanceId__1="x-2"),
    "terminate-both": ec2("TerminateInstances", InstanceId__1="i-1", InstanceId__2="i-2"),
    "stop": ec2("StopInstances", InstanceId__1="i-2"),
    "console": ec2("GetConsoleOutput", InstanceId="i-2"),
    "password": ec2("GetPasswordData", InstanceId="i-2"),
    "serial-console": Call("ec2-instance-connect", "SendSerialConsoleSSHPublicKey", {}),
    "connect": Call("ec2-instance-connect", "SendSSHPublicKey", {}),
    "open-metadata": ec2("ModifyInstanceMetadataOptions", InstanceId="i-2", HttpTokens="optional"),
    # Other people's networks.
    "attach-gateway": ec2("AttachInternetGateway", InternetGatewayId="igw-1", VpcId="vpc-2"),
    "attach-their-gateway": ec2("AttachInternetGateway", InternetGatewayId="igw-2", VpcId="vpc-1"),
    "detach-gateway": ec2("DetachInternetGateway", InternetGatewayId="igw-2", VpcId="vpc-2"),
    "our-table-their-subnet": ec2("AssociateRouteTable", RouteTableId="rtb-1", SubnetId="subnet-2"),
    "their-table-our-subnet": ec2("AssociateRouteTable", RouteTableId="rtb-2", SubnetId="subnet-1"),
    "part-table": ec2("DisassociateRouteTable", AssociationId="rtbassoc-2"),
    "replace-table": ec2("ReplaceRouteTableAssociation", AssociationId="rtbassoc-2", RouteTableId="rtb-1"),
    "replace-acl": ec2("ReplaceNetworkAclAssociation", AssociationId="aclassoc-2", NetworkAclId="acl-1"),
    "replace-their-acl": ec2("ReplaceNetworkAclAssociation", AssociationId="aclassoc-2", NetworkAclId="acl-2"),
    "delete-acl": ec2("DeleteNetworkAcl", NetworkAclId="acl-2"),
    "acl-entry": ec2("CreateNetworkAclEntry", NetworkAclId="acl-2"),
    "route": ec2("CreateRoute", RouteTableId="rtb-2", GatewayId="igw-1"),
    "delete-route": ec2("DeleteRoute", RouteTableId="rtb-2"),
    "open-group": ec2("AuthorizeSecurityGroupIngress", GroupId="sg-2"),
    "open-group-tagged": Call(
        "ec2", "AuthorizeSecurityGroupIngress", {"GroupId": "sg-2", **tagged("security-group-rule")}
    ),
    "open-group-by-name": ec2("AuthorizeSecurityGroupIngress", GroupName="default"),
    "delete-group-by-name": ec2("DeleteSecurityGroup", GroupName="default"),
    "delete-key-by-id": ec2("DeleteKeyPair", KeyPairId="key-0abc2"),
    "delete-no-key": ec2("DeleteKeyPair"),
    "close-group": ec2("RevokeSecurityGroupEgress", GroupId="sg-2"),
    "subnet-in-theirs": Call("ec2", "CreateSubnet", {"VpcId": "vpc-2", **tagged("subnet")}),
    "group-in-theirs": Call("ec2", "CreateSecurityGroup", {"VpcId": "vpc-2", **tagged("security-group")}),
    "untagged-vpc": ec2("CreateVpc", CidrBlock="10.0.0.0/16"),
    "vpc-attribute": ec2("ModifyVpcAttribute", VpcId="vpc-2"),
    "delete-vpc": ec2("DeleteVpc", VpcId="vpc-2"),
    "peering": ec2("CreateVpcPeeringConnection", VpcId="vpc-1", PeerVpcId="vpc-2"),
    "endpoint": ec2("CreateVpcEndpoint", VpcId="vpc-1"),
    # What is theirs made ours, and ours theirs.
    "tag-theirs-ours": tags_on("i-2", "provisioner:owner"),
    "tag-their-subnet": tags_on("subnet-2", "provisioner:owner"),
    "tag-theirs-limit": tags_on("i-2", "provisioner:expires-at"),
    "tag-ours-owner": tags_on("i-1", "provisioner:owner"),
    "tag-our-image": tags_on("ami-1", "provisioner:lease-until"),
    "tag-their-table": tags_on("rtb-2", "provisioner:seen:192.0.2.1/32"),
    "untag-our-table": tags_on("rtb-1", "provisioner:owner", "DeleteTags"),
    "untag-our-table-whole": ec2("DeleteTags", ResourceId__1="rtb-1"),
    "untag-ours": tags_on("i-1", "provisioner:owner", "DeleteTags"),
    # Schedules, and what ends everybody's time limits.
    "schedule-with-role": schedule("CreateSchedule", role=OTHER_ROLE),
    "schedule-new-role": schedule("UpdateSchedule", role=OTHER_ROLE),
    "schedule-elsewhere": schedule("CreateSchedule", "default"),
    "delete-their-schedule": schedule("DeleteSchedule", "production"),
    "delete-group": Call("scheduler", "DeleteScheduleGroup", {"Name": "provisioner"}),
    "delete-their-group": Call("scheduler", "DeleteScheduleGroup", {"Name": "production"}),
    # State.
    "read-other-bucket": s3("GetObject", "secrets", "key"),
    "read-other-prefix": s3("GetObject", "bucket", "other/terraform.tfstate"),
    "prefix-with-more": s3("GetObject", "bucket", "prefix-of-others/terraform.tfstate"),
    "delete-bucket": s3("DeleteBucket", "bucket"),
}  # fmt: skip


def denied(call: Call, document: Mapping[str, object] = DAILY) -> list[str]:
    """What of a call a policy denies: one request is enough to stop it."""
    return [str(request) for request in requests(call, World()) if not allowed(document, request)]


@pytest.mark.parametrize("call", ATTACKS.values(), ids=ATTACKS.keys())
def test_the_daily_rights_are_no_way_to_more(call: Call) -> None:
    assert denied(call)


@pytest.mark.parametrize("call", PERMITTED.values(), ids=PERMITTED.keys())
def test_what_is_denied_is_denied_for_its_difference_from_this(call: Call) -> None:
    assert denied(call) == []


def test_a_role_can_be_handed_to_the_scheduler_alone() -> None:
    for service, role, expected in (
        ("scheduler.amazonaws.com", ROLE, True),
        ("ec2.amazonaws.com", ROLE, False),
        ("lambda.amazonaws.com", ROLE, False),
        ("scheduler.amazonaws.com", OTHER_ROLE, False),
        ("scheduler.amazonaws.com", f"{ROLE}-eu-west-1", False),
    ):
        request = Request("iam:PassRole", role, {"iam:PassedToService": (service,)})
        assert allowed(DAILY, request) is expected
    assert not allowed(DAILY, Request("iam:PassRole", ROLE))


def test_no_daily_right_writes_to_iam() -> None:
    actions = {action for statement in DAILY["Statement"] for action in statement["Action"]}
    assert {action for action in actions if action.startswith("iam:")} == {"iam:GetRole", "iam:PassRole"}
    assert not any(action.partition(":")[2].startswith("*") for action in actions)


def test_the_role_ends_machines_of_ours_and_nothing_else() -> None:
    rights, trusted = setup.rights(ACCOUNT), setup.trust(ACCOUNT)["Statement"]
    instance = f"arn:aws:ec2:eu-west-1:{ACCOUNT}:instance/i-1"
    tag = "aws:ResourceTag/provisioner:environment"
    assert allowed(rights, Request("ec2:TerminateInstances", instance, {tag: ("e-1",)}))
    assert not allowed(rights, Request("ec2:TerminateInstances", instance, {tag: ("",)}))
    assert not allowed(rights, Request("ec2:TerminateInstances", instance))
    assert not allowed(rights, Request("ec2:RunInstances", instance, {tag: ("e-1",)}))
    # Another account's schedules do not take it, even if they name it (IAM, "The confused deputy problem").
    assert [statement["Condition"] for statement in trusted] == [{"StringEquals": {"aws:SourceAccount": ACCOUNT}}]
    assert [statement["Principal"] for statement in trusted] == [{"Service": "scheduler.amazonaws.com"}]


def test_the_administrators_rights_reach_one_role() -> None:
    document = setup.policy()
    assert denied(iam("CreateRole"), document) == []
    assert denied(iam("PutRolePolicy"), document) == []
    for call in (iam("CreateRole", "administrator"), iam("PutRolePolicy", "administrator"), iam("CreateUser", "me")):
        assert denied(call, document)


def test_the_policies_fit_into_managed_policies() -> None:
    state, types = "s3://" + "b" * 63 + "/" + "p" * 60, ["t3*", "m7i*", "c7i*", "r7i*", "g6e.12xlarge"]
    regions = ["us-east-1", "us-west-2", "eu-central-1", "ap-southeast-2"]
    for document in (
        rights.policy("launch", state, regions, types), rights.policy("manage", state), setup.policy(),
    ):  # fmt: skip
        assert len(json.dumps(document, separators=(",", ":"))) <= rights.POLICY_CHARACTERS - ROOM_CHARACTERS


def test_limits_of_regions_and_types_hold_for_whatever_launches() -> None:
    limited = rights.policy("launch", "", ["us-east-1"], ["t3*", "m7i.large"])
    for name in ("t3.micro", "t3a.large", "m7i.large"):
        assert denied(launch(InstanceType=name), limited) == []
    for name in ("p5.48xlarge", "m7i.xlarge", "at3.micro"):
        assert denied(launch(InstanceType=name), limited)
    assert denied(launch(), limited)
    for call in (launch(InstanceType="t3.micro"), PERMITTED["subnet"], ec2("CreateVpc", **tagged("vpc"))):
        assert denied(replace(call, region="eu-west-1"), limited)
    assert denied(ec2("CreateVpc", **tagged("vpc")), limited) == []
    # What there is can still be removed everywhere.
    assert denied(replace(ec2("TerminateInstances", InstanceId__1="i-1"), region="eu-west-1")) == []
