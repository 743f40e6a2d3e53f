"""The rights that the aws cloud needs from day to day, as an IAM policy, and whether the credentials have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from botocore.exceptions import ClientError

from provisioner.clouds.aws.api import EXPIRY_TAG, LEASE_TAG, REFUSED, Api, asking, code_of
from provisioner.clouds.aws.cleanup import schedules
from provisioner.clouds.aws.images import VENDORS

# Tags of what is ours. A user with these rights alone cannot put them on anything that exists already.
OURS = {"Null": {"aws:ResourceTag/provisioner:owner": "false"}}
TAGGED_OURS = {"Null": {"aws:RequestTag/provisioner:owner": "false"}}
EC2 = "arn:aws:ec2:*:*:"
# Of the distributions' images: account numbers, or `amazon`.
OWNERS = {owner for owner, _ in VENDORS.values()}
# Read actions take no conditions (Service Authorization Reference, "Actions defined by Amazon EC2").
READ = (
    "ec2:DescribeAccountAttributes", "ec2:DescribeAddresses", "ec2:DescribeAvailabilityZones",
    "ec2:DescribeImages", "ec2:DescribeInstanceCreditSpecifications", "ec2:DescribeInstanceStatus",
    "ec2:DescribeInstanceTypes", "ec2:DescribeInstances", "ec2:DescribeInternetGateways", "ec2:DescribeKeyPairs",
    "ec2:DescribeNetworkAcls", "ec2:DescribeNetworkInterfaces", "ec2:DescribeRegions", "ec2:DescribeRouteTables",
    "ec2:DescribeSecurityGroup*", "ec2:DescribeSnapshots", "ec2:DescribeSpot*", "ec2:DescribeSubnets",
    "ec2:DescribeTags", "ec2:DescribeVolumes", "ec2:DescribeVpcs", "pricing:GetProducts", "scheduler:ListSchedules",
    "servicequotas:GetServiceQuota",
)  # fmt: skip
# Actions that look into, join, change or delete what exists: every resource that they name must be ours.
CHANGE = (
    "ec2:AssociateRouteTable", "ec2:AttachInternetGateway", "ec2:AuthorizeSecurityGroup*",
    "ec2:CreateNetworkAclEntry", "ec2:CreateRoute", "ec2:DeleteInternetGateway",
    "ec2:DeleteKeyPair", "ec2:DeleteNetworkAcl", "ec2:DeleteNetworkAclEntry", "ec2:DeleteNetworkInterface",
    "ec2:DeleteRoute", "ec2:DeleteRouteTable", "ec2:DeleteSecurityGroup", "ec2:DeleteSnapshot", "ec2:DeleteSubnet",
    "ec2:DeleteVolume", "ec2:DeleteVpc", "ec2:DeregisterImage", "ec2:DescribeInstanceAttribute",
    "ec2:DescribeVpcAttribute", "ec2:DetachInternetGateway", "ec2:DisassociateRouteTable", "ec2:GetConsoleOutput",
    "ec2:ModifyInstanceAttribute", "ec2:ModifyInstanceMetadataOptions", "ec2:ModifySubnetAttribute",
    "ec2:ModifyVpcAttribute", "ec2:ReplaceNetworkAclAssociation", "ec2:RevokeSecurityGroup*", "ec2:StopInstances",
    "ec2:TerminateInstances",
)  # fmt: skip
IN_A_VPC = ("ec2:CreateNetworkAcl", "ec2:CreateRouteTable", "ec2:CreateSecurityGroup", "ec2:CreateSubnet")
# The tags that change while machines run.
CHANGING_TAGS = [EXPIRY_TAG, LEASE_TAG]
SCHEDULE = (
    "scheduler:CreateSchedule", "scheduler:DeleteSchedule", "scheduler:GetSchedule", "scheduler:UpdateSchedule",
)  # fmt: skip


def policy(state: str) -> dict[str, Any]:
    """Returns the IAM policy with exactly the rights that provisioner needs from day to day.

    They make no role and no user, and touch only what carries our tag from its creation on.

    Args:
        state: `s3://bucket/prefix` of Terraform's state, or empty if it is local.
    """
    statements = [
        _allow("Read", READ, "*"),
        *_launch(),
        *_network(),
        _allow("ChangeOurs", CHANGE, "*", OURS),
        # Of a VPC's default ACL, which has no tag. AWS lets an ACL join a subnet of its own VPC only, and that is ours.
        _allow("DefaultAcl", ("ec2:ReplaceNetworkAclAssociation",), f"{EC2}network-acl/*"),
        # They have no tags, and Terraform cancels an instance's before it ends the instance. That ends no machine.
        _allow("SpotRequests", ("ec2:CancelSpotInstanceRequests",), _arns("spot-instances-request")),
        # A rule's group must be ours as well.
        _allow("Rules", ("ec2:AuthorizeSecurityGroup*", "ec2:RevokeSecurityGroup*"), f"{EC2}security-group-rule/*"),
        # Tags come with the creation, and none comes later but those that change.
        _allow("TagNew", ("ec2:CreateTags",), f"{EC2}*", {"Null": {"ec2:CreateAction": "false"}}),
        _allow(
            "TagOurs",
            ("ec2:CreateTags",),
            _arns("instance", "volume"),
            {**OURS, "ForAllValues:StringEquals": {"aws:TagKeys": CHANGING_TAGS}},
        ),
        *_schedules(),
    ]
    if state:
        bucket, _, prefix = state.removeprefix("s3://").partition("/")
        objects = f"arn:aws:s3:::{bucket}/{prefix.strip('/')}/*" if prefix.strip("/") else f"arn:aws:s3:::{bucket}/*"
        # Without a condition on the prefix: init lists workspaces below `env:/`, and S3 says that a state does not
        # exist yet, instead of "access denied", only to those who may list the bucket. AWS documents no prefix for that
        # question, and a list of the whole bucket has none either: no condition is known to tell them apart.
        statements.append(_allow("StateBucket", ("s3:ListBucket",), f"arn:aws:s3:::{bucket}"))
        statements.append(_allow("State", ("s3:GetObject", "s3:PutObject", "s3:DeleteObject"), objects))
    return {"Version": "2012-10-17", "Statement": statements}


def _launch() -> list[dict[str, Any]]:
    """Instances from our images and the distributions', in our subnets and groups, and images of our instances."""
    run = ("ec2:RunInstances",)
    return [
        _allow("LaunchOurs", run, _arns("image", "key-pair", "security-group", "snapshot", "subnet"), OURS),
        _allow("LaunchVendors", run, _arns("image", "snapshot"), {"StringEquals": {"ec2:Owner": sorted(OWNERS)}}),
        _allow(
            "LaunchPlain",
            run,
            _arns("instance"),
            {
                "Null": {"aws:RequestTag/provisioner:owner": "false", "ec2:InstanceProfile": "true"},
                "StringEquals": {"ec2:MetadataHttpTokens": "required"},
            },
        ),
        _allow("LaunchDisks", run, _arns("volume"), TAGGED_OURS),
        # A card that exists already cannot be asked for a public address. Spot requests take no tags from Terraform.
        _allow("LaunchCards", run, _arns("network-interface"), {"Null": {"ec2:AssociatePublicIpAddress": "false"}}),
        _allow("LaunchSpot", run, _arns("spot-instances-request")),
        _allow("Images", ("ec2:CreateImage",), _arns("image", "snapshot"), TAGGED_OURS),
        _allow("ImagesOfOurs", ("ec2:CreateImage",), _arns("instance"), OURS),
    ]


def _network() -> list[dict[str, Any]]:
    """Networks, groups and key pairs that carry our tag from the beginning, in VPCs that do."""
    new = _arns("internet-gateway", "key-pair", "network-acl", "route-table", "security-group", "subnet")
    return [
        _allow("Create", (*IN_A_VPC, "ec2:CreateInternetGateway", "ec2:ImportKeyPair"), new, TAGGED_OURS),
        _allow("CreateVpc", ("ec2:CreateVpc",), f"{EC2}vpc/*", TAGGED_OURS),
        _allow("CreateInOurs", IN_A_VPC, f"{EC2}vpc/*", OURS),
    ]


def _schedules() -> list[dict[str, Any]]:
    """Schedules in our group, which is never deleted, with the one role that `aws setup` made for them.

    Schedules carry no tags.
    """
    role = schedules.role_arn("*")
    group = f"arn:aws:scheduler:*:*:schedule-group/{schedules.GROUP}"
    passed_to = {"StringEquals": {"iam:PassedToService": "scheduler.amazonaws.com"}}
    return [
        _allow("Schedules", SCHEDULE, f"arn:aws:scheduler:*:*:schedule/{schedules.GROUP}/*"),
        _allow("ScheduleGroup", ("scheduler:CreateScheduleGroup", "scheduler:GetScheduleGroup"), group),
        _allow("SchedulerRole", ("iam:GetRole",), role),
        _allow("PassSchedulerRole", ("iam:PassRole",), role, passed_to),
    ]


def _arns(*kinds: str) -> list[str]:
    return [f"{EC2}{kind}/*" for kind in kinds]


def _allow(name: str, actions: tuple[str, ...], resources: Any, condition: Any = None) -> dict[str, Any]:
    statement = {"Sid": name, "Effect": "Allow", "Action": list(actions), "Resource": resources}
    return {**statement, "Condition": condition} if condition else statement


def refused(api: Api, region: str) -> list[str]:
    """Lists the actions that the credentials do not allow, as far as they can be tried without effect.

    EC2 answers a dry run with DryRunOperation if it would have succeeded. Actions that only read are simply called.
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
