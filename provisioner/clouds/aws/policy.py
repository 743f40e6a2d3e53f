"""The rights that the aws cloud needs, as an IAM policy, and whether the credentials have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from botocore.exceptions import ClientError

from provisioner.clouds.aws.api import REFUSED, Api, asking, code_of

# Read actions take no conditions (Service Authorization Reference, "Actions defined by Amazon EC2").
READ = (
    "ec2:DescribeAccountAttributes", "ec2:DescribeAddresses", "ec2:DescribeAvailabilityZones", "ec2:DescribeImages",
    "ec2:DescribeRegions", "ec2:DescribeSpotInstanceRequests", "ec2:DescribeSpotPriceHistory",
    "ec2:DescribeInstanceAttribute", "ec2:DescribeInstanceCreditSpecifications", "ec2:DescribeInstanceTypes",
    "ec2:DescribeInstances", "ec2:DescribeInternetGateways", "ec2:DescribeKeyPairs", "ec2:DescribeNetworkAcls",
    "ec2:DescribeNetworkInterfaces", "ec2:DescribeRouteTables", "ec2:DescribeSecurityGroupRules",
    "ec2:DescribeSecurityGroups", "ec2:DescribeSnapshots", "ec2:DescribeSubnets", "ec2:DescribeTags",
    "ec2:DescribeVolumes", "ec2:DescribeVpcAttribute", "ec2:DescribeVpcs", "ec2:GetConsoleOutput",
    "ec2:DescribeInstanceStatus", "pricing:GetProducts", "sts:GetCallerIdentity",
)  # fmt: skip
# Actions that create a resource; EC2 checks the tags that are given with it.
CREATE = (
    "ec2:CreateImage", "ec2:CreateInternetGateway", "ec2:CreateNetworkAcl", "ec2:CreateRouteTable",
    "ec2:CreateSecurityGroup", "ec2:CreateSubnet", "ec2:CreateVpc", "ec2:ImportKeyPair", "ec2:RunInstances",
)  # fmt: skip
# Actions that change or delete a resource; allowed only on resources with our tag.
CHANGE = (
    "ec2:AuthorizeSecurityGroupEgress", "ec2:AuthorizeSecurityGroupIngress", "ec2:CreateNetworkAclEntry",
    "ec2:CancelSpotInstanceRequests",
    "ec2:CreateRoute", "ec2:DeleteInternetGateway", "ec2:DeleteKeyPair", "ec2:DeleteNetworkAcl",
    "ec2:DeleteNetworkAclEntry", "ec2:DeleteNetworkInterface", "ec2:DeleteRoute", "ec2:DeleteRouteTable",
    "ec2:DeleteSecurityGroup", "ec2:DeleteSnapshot", "ec2:DeleteSubnet", "ec2:DeleteVolume", "ec2:DeleteVpc",
    "ec2:DeregisterImage", "ec2:ModifyInstanceAttribute", "ec2:ModifyInstanceMetadataOptions",
    "ec2:ModifySecurityGroupRules", "ec2:ModifySubnetAttribute", "ec2:ModifyVpcAttribute", "ec2:ReplaceRoute",
    "ec2:RevokeSecurityGroupEgress", "ec2:RevokeSecurityGroupIngress", "ec2:StopInstances",
    "ec2:TerminateInstances",
)  # fmt: skip
# Actions that join two resources, one of which may be AWS's own and without our tag: a VPC's default network ACL.
JOIN = (
    "ec2:AssociateRouteTable", "ec2:AttachInternetGateway", "ec2:DetachInternetGateway", "ec2:DisassociateRouteTable",
    "ec2:ReplaceNetworkAclAssociation", "ec2:ReplaceRouteTableAssociation",
)  # fmt: skip
IN_A_VPC = ("ec2:CreateNetworkAcl", "ec2:CreateRouteTable", "ec2:CreateSecurityGroup", "ec2:CreateSubnet")
RULES = ("ec2:AuthorizeSecurityGroup*", "ec2:RevokeSecurityGroup*", "ec2:ModifySecurityGroupRules")
# Schedules carry no tags; their group says that they are ours.
SCHEDULE = (
    "scheduler:CreateSchedule", "scheduler:DeleteSchedule", "scheduler:GetSchedule", "scheduler:UpdateSchedule",
)  # fmt: skip
SCHEDULE_GROUP = (
    "scheduler:CreateScheduleGroup", "scheduler:DeleteScheduleGroup", "scheduler:GetScheduleGroup",
    "scheduler:ListTagsForResource", "scheduler:TagResource",
)  # fmt: skip
ROLE = (
    "iam:CreateRole", "iam:DeleteRole", "iam:DeleteRolePolicy", "iam:GetRole", "iam:GetRolePolicy",
    "iam:ListAttachedRolePolicies", "iam:ListInstanceProfilesForRole", "iam:ListRolePolicies", "iam:PutRolePolicy",
    "iam:TagRole",
)  # fmt: skip


def policy(state: str) -> dict[str, Any]:
    """Returns the IAM policy with exactly the rights that provisioner needs.

    Args:
        state: `s3://bucket/prefix` of Terraform's state, or empty if it is local.
    """
    ours = {"Null": {"aws:ResourceTag/provisioner:owner": "false"}}
    tagged_ours = {"Null": {"aws:RequestTag/provisioner:owner": "false"}}
    arn = "arn:aws:ec2:*:*:"
    new = ["instance/*", "volume/*", "vpc/*", "subnet/*", "internet-gateway/*", "route-table/*", "network-acl/*"]
    new += ["security-group/*", "security-group-rule/*", "key-pair/*", "image/*", "snapshot/*"]
    # What RunInstances uses besides what it creates; a distribution's image is not ours.
    start = ["key-pair/*", "security-group/*", "subnet/*", "network-interface/*", "snapshot/*", "image/*"]
    while_creating = {"Null": {"ec2:CreateAction": "false"}}
    for_scheduler = {"StringEquals": {"iam:PassedToService": "scheduler.amazonaws.com"}}
    spot = "arn:aws:iam::*:role/aws-service-role/spot.amazonaws.com/*"
    statements: list[dict[str, Any]] = [
        _allow("Read", READ, "*"),
        _allow("CreateTagged", CREATE, [arn + resource for resource in new], tagged_ours),
        _allow("CreateIn", IN_A_VPC, f"{arn}vpc/*", ours),
        _allow("StartFrom", ("ec2:RunInstances",), [arn + resource for resource in start] + ["arn:aws:ec2:*::image/*"]),
        _allow("ImageOf", ("ec2:CreateImage",), f"{arn}instance/*", ours),
        _allow("ChangeOurs", CHANGE, "*", ours),
        _allow("RulesOfOurGroups", RULES, f"{arn}security-group-rule/*"),
        _allow("Join", JOIN, "*"),
        _allow("Tag", ("ec2:CreateTags",), [arn + resource for resource in new], while_creating),
        _allow("TagOurs", ("ec2:CreateTags", "ec2:DeleteTags"), f"{arn}*", ours),
        _allow("SchedulerRole", ROLE, "arn:aws:iam::*:role/provisioner-scheduler-*"),
        _allow("PassRole", ("iam:PassRole",), "arn:aws:iam::*:role/provisioner-scheduler-*", for_scheduler),
        _allow("Schedules", SCHEDULE, "arn:aws:scheduler:*:*:schedule/provisioner/*"),
        _allow("ScheduleGroup", SCHEDULE_GROUP, "arn:aws:scheduler:*:*:schedule-group/provisioner"),
        _allow("ListSchedules", ("scheduler:ListSchedules",), "*"),
        _allow("FirstSpot", ("iam:CreateServiceLinkedRole",), spot),
    ]
    if state:
        bucket, _, prefix = state.removeprefix("s3://").partition("/")
        objects = f"arn:aws:s3:::{bucket}/{prefix.strip('/')}/*" if prefix.strip("/") else f"arn:aws:s3:::{bucket}/*"
        statements.append(_allow("StateBucket", ("s3:ListBucket",), f"arn:aws:s3:::{bucket}"))
        statements.append(_allow("State", ("s3:GetObject", "s3:PutObject", "s3:DeleteObject"), objects))
    return {"Version": "2012-10-17", "Statement": statements}


def _allow(name: str, actions: tuple[str, ...], resources: Any, condition: Any = None) -> dict[str, Any]:
    statement = {"Sid": name, "Effect": "Allow", "Action": list(actions), "Resource": resources}
    return {**statement, "Condition": condition} if condition else statement


def refused(api: Api, region: str, arn: str) -> list[str]:
    """Lists the actions that the credentials do not allow, as far as they can be tried without effect.

    EC2 answers a dry run with DryRunOperation if it would have succeeded. Actions that only read are simply called.

    Args:
        arn: the user or role.
    """
    ec2 = api.client("ec2", region)
    tags = [{"Key": "provisioner:owner", "Value": "doctor"}]

    def specification(kind: str) -> list[dict[str, Any]]:
        return [{"ResourceType": kind, "Tags": tags}]

    attempts: dict[str, Callable[[], Any]] = {
        "ec2:DescribeInstances": lambda: ec2.describe_instances(MaxResults=5),
        "ec2:DescribeInstanceTypes": lambda: ec2.describe_instance_types(MaxResults=5),
        "ec2:DescribeImages": lambda: ec2.describe_images(Owners=["self"]),
        "ec2:CreateVpc": lambda: ec2.create_vpc(
            CidrBlock="10.214.0.0/16", DryRun=True, TagSpecifications=specification("vpc")
        ),
        "ec2:CreateInternetGateway": lambda: ec2.create_internet_gateway(
            DryRun=True, TagSpecifications=specification("internet-gateway")
        ),
        "ec2:ImportKeyPair": lambda: ec2.import_key_pair(
            KeyName="provisioner-doctor",
            PublicKeyMaterial=b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl",
            DryRun=True,
            TagSpecifications=specification("key-pair"),
        ),
    }
    refused_actions = []
    for action, attempt in attempts.items():
        with asking(f"Checking {action}"):
            try:
                attempt()
            except ClientError as error:
                if code_of(error) in REFUSED:
                    refused_actions.append(action)
                elif code_of(error) != "DryRunOperation":
                    raise
    return refused_actions
