"""The rights that the aws cloud needs, as an IAM policy, and whether the credentials have them.

EC2 answers a dry run with DryRunOperation if the credentials allow the call, and UnauthorizedOperation if not (EC2 API
reference, "DryRun"). Any other error says nothing about rights. ModifyVpcAttribute and ModifySubnetAttribute know no
dry runs, and neither do EventBridge Scheduler and S3.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

import yaml
from botocore.exceptions import ClientError

from provisioner.base.errors import UsageError
from provisioner.clouds.aws import cleanup
from provisioner.clouds.aws.api import (
    ENVIRONMENT_TAG,
    LEASE_TAG,
    NO_LOGIN,
    OWNER_TAG,
    REFUSED,
    THROTTLED,
    Api,
    asking,
    code_of,
)
from provisioner.clouds.aws.images import IMAGE_TAG

POLICY = Path(__file__).with_name("policy.yaml")
Part = Literal["launch", "manage"]
# Of a managed policy, white space not counted (IAM user guide, "IAM and AWS STS quotas").
POLICY_CHARACTERS = 6144


def policy(part: Part, state: str, regions: Collection[str] = (), types: Collection[str] = ()) -> dict[str, Any]:
    """Returns one of the two IAM policies with exactly the rights that provisioner needs from day to day.

    They make no role and no user, and touch only what carries our tag from its creation on.

    Args:
        part: what makes something new, or what manages what there is.
        state: `s3://bucket/prefix` of Terraform's state, or empty if it is local.
        regions: where something may be made; empty for everywhere.
        types: instance types that may be launched, also as patterns such as `t3*`; empty for all.

    Raises:
        UsageError: IAM does not take so long a policy.
    """
    statements: list[dict[str, Any]] = yaml.safe_load(POLICY.read_text())[part]
    for statement in statements if part == "launch" else ():
        conditions = statement["Condition"] = statement.get("Condition", {})
        if regions:
            conditions["StringEquals"] = conditions.get("StringEquals", {}) | {"aws:RequestedRegion": list(regions)}
        if types and statement["Sid"] == "LaunchPlain":
            conditions["StringLike"] = {"ec2:InstanceType": list(types)}
    if state and part == "manage":
        bucket, _, prefix = state.removeprefix("s3://").partition("/")
        objects = "/".join(part for part in (f"arn:aws:s3:::{bucket}", prefix.strip("/"), "*") if part)
        # Without a condition on the prefix: init lists workspaces below `env:/`, and S3 says that a state does not
        # exist yet, instead of "access denied", only to those who may list the bucket. AWS documents no prefix for that
        # question, and a list of the whole bucket has none either: no condition is known to tell them apart.
        statements.append(
            {"Sid": "StateBucket", "Effect": "Allow", "Action": ["s3:ListBucket"], "Resource": f"arn:aws:s3:::{bucket}"}
        )
        actions = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"]
        statements.append({"Sid": "State", "Effect": "Allow", "Action": actions, "Resource": objects})
    document = {"Version": "2012-10-17", "Statement": statements}
    if (length := len(json.dumps(document, separators=(",", ":")))) > POLICY_CHARACTERS:
        raise UsageError(
            f"The policy would have {length} characters, and IAM takes {POLICY_CHARACTERS}.",
            hint="Name fewer regions and types: a pattern such as m7i* is one.",
        )
    return document


TAGS = [{"Key": OWNER_TAG, "Value": "dry-run"}, {"Key": ENVIRONMENT_TAG, "Value": "dry-run"}]
KEY = b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"
# The documentation's network (RFC 5737): no rule is ever made of it.
NETWORK = "192.0.2.0/24"
# Well-formed, and of no request: a user who may cancel this one may cancel any.
SPOT_REQUEST = "sir-00000000"
Attempts = dict[str, dict[str, Any]]
"""The arguments of each call, by boto3's name; what follows a space tells two of one name apart."""


def refused(api: Api, region: str) -> dict[str, str]:
    """Returns the actions that the credentials do not allow, of those that can be tried before anything exists.

    Returns:
        the action -> EC2's words.
    """
    ec2 = api.client("ec2", region)
    attempts: Attempts = {
        "describe_instances": {},
        "describe_instance_types": {},
        "describe_images": {"Owners": ["self"]},
        "create_vpc": {"CidrBlock": "10.214.0.0/16", "TagSpecifications": _tags("vpc")},
        "create_internet_gateway": {"TagSpecifications": _tags("internet-gateway")},
        "import_key_pair": {
            "KeyName": "provisioner-doctor", "PublicKeyMaterial": KEY, "TagSpecifications": _tags("key-pair"),
        },
    }  # fmt: skip
    found = _refusals(ec2, attempts, tells_faults=True)
    return {f"ec2:{ec2.meta.method_to_api_mapping[name]}": words for name, words in found}


def refused_on(api: Api, region: str, environment: str) -> list[str]:
    """Lists the EC2 actions that the credentials do not allow on an environment that is up.

    Args:
        environment: its id.

    Returns:
        a line for each: the action, and EC2's words.

    Raises:
        HostError, InfrastructureError: EC2 does not answer.
    """
    ec2 = api.client("ec2", region)
    with asking("Looking at the environment"):
        instance = cleanup.instances(api, region, environment)[0]
        attempts = _attempts(ec2, instance) | _disk_attempts(ec2, instance)
    return [f"{action}: {words}"[:300] for action, words in _refusals(ec2, attempts, tells_faults=False)]


def _refusals(ec2: Any, attempts: Attempts, *, tells_faults: bool) -> Iterator[tuple[str, str]]:
    """Asks EC2 for dry runs. Yields each action that it refuses, with its words.

    Args:
        tells_faults: whether an answer that says nothing about rights is raised, such as that of an account that has
            not signed up for EC2.
    """
    for action, arguments in attempts.items():
        with asking(f"A dry run of {action}"):
            try:
                getattr(ec2, action.partition(" ")[0])(**arguments, DryRun=True)
            except ClientError as error:
                code = code_of(error)
                if code in REFUSED:
                    yield action, error.response["Error"].get("Message", "")
                elif code in (*NO_LOGIN, *THROTTLED) or (tells_faults and code != "DryRunOperation"):
                    raise


def _attempts(ec2: Any, instance: dict[str, Any]) -> Attempts:
    """Returns the calls that create, change and delete machines and what surrounds them."""
    vpc, subnet = str(instance["VpcId"]), str(instance["SubnetId"])
    group = str(instance["SecurityGroups"][0]["GroupId"])
    ours = [{"Name": "vpc-id", "Values": [vpc]}, {"Name": "tag-key", "Values": [OWNER_TAG]}]
    tables = ec2.describe_route_tables(Filters=ours)["RouteTables"]
    table = str(tables[0]["RouteTableId"])
    joined = [row["RouteTableAssociationId"] for each in tables for row in each["Associations"] if row.get("SubnetId")]
    acl = ec2.describe_network_acls(Filters=ours)["NetworkAcls"][0]
    attached = [{"Name": "attachment.vpc-id", "Values": [vpc]}]
    gateway = str(ec2.describe_internet_gateways(Filters=attached)["InternetGateways"][0]["InternetGatewayId"])
    machine = {"InstanceId": instance["InstanceId"]}
    rule = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": NETWORK}]}
    entry = {"NetworkAclId": acl["NetworkAclId"], "RuleNumber": 32000, "Egress": False}
    route = {"RouteTableId": table, "DestinationCidrBlock": NETWORK}
    between = {"InternetGatewayId": gateway, "VpcId": vpc}
    launch = {
        "ImageId": instance["ImageId"],
        "InstanceType": instance["InstanceType"],
        "KeyName": instance["KeyName"],
        "MinCount": 1,
        "MaxCount": 1,
        "MetadataOptions": {"HttpTokens": "required"},
        "NetworkInterfaces": [
            {"DeviceIndex": 0, "SubnetId": subnet, "Groups": [group], "AssociatePublicIpAddress": True}
        ],
        "TagSpecifications": _tags("instance", "volume"),
    }
    attempts: Attempts = {
        "create_security_group": {
            "GroupName": "dry-run", "Description": "dry run", "VpcId": vpc,
            "TagSpecifications": _tags("security-group"),
        },
        "authorize_security_group_ingress": {"GroupId": group, "IpPermissions": [rule]},
        "authorize_security_group_egress": {"GroupId": group, "IpPermissions": [rule]},
        "revoke_security_group_ingress": {"GroupId": group, "IpPermissions": [rule]},
        "revoke_security_group_egress": {"GroupId": group, "IpPermissions": [rule]},
        "delete_security_group": {"GroupId": group},
        "create_subnet": {"VpcId": vpc, "CidrBlock": NETWORK, "TagSpecifications": _tags("subnet")},
        "delete_subnet": {"SubnetId": subnet},
        "create_route_table": {"VpcId": vpc, "TagSpecifications": _tags("route-table")},
        "delete_route_table": {"RouteTableId": table},
        "create_network_acl": {"VpcId": vpc, "TagSpecifications": _tags("network-acl")},
        "create_network_acl_entry": {**entry, "Protocol": "6", "RuleAction": "allow", "CidrBlock": NETWORK,
                                     "PortRange": {"From": 22, "To": 22}},
        "delete_network_acl_entry": entry,
        "delete_network_acl": {"NetworkAclId": acl["NetworkAclId"]},
        "run_instances on demand": launch,
        "run_instances spot": {**launch, "InstanceMarketOptions": {"MarketType": "spot"}},
        "create_tags": {"Resources": [instance["InstanceId"]], "Tags": [{"Key": LEASE_TAG, "Value": "dry-run"}]},
        "describe_instance_attribute": {**machine, "Attribute": "userData"},
        "get_console_output": machine,
        "modify_instance_attribute": {**machine, "InstanceInitiatedShutdownBehavior": {"Value": "stop"}},
        "modify_instance_metadata_options": {**machine, "HttpEndpoint": "disabled"},
        "create_image": {**machine, "Name": "dry-run", "TagSpecifications": _tags("image", "snapshot")},
        "stop_instances": {"InstanceIds": [instance["InstanceId"]]},
        "terminate_instances": {"InstanceIds": [instance["InstanceId"]]},
        "delete_key_pair": {"KeyName": instance["KeyName"]},
        "delete_vpc": {"VpcId": vpc},
        "create_route": {**route, "GatewayId": gateway},
        "delete_route": route,
        "associate_route_table": {"RouteTableId": table, "SubnetId": subnet},
        "attach_internet_gateway": between,
        "detach_internet_gateway": between,
        "delete_internet_gateway": {"InternetGatewayId": gateway},
    }  # fmt: skip
    if joined:
        attempts["disassociate_route_table"] = {"AssociationId": joined[0]}
    if acl["Associations"]:
        association = acl["Associations"][0]["NetworkAclAssociationId"]
        attempts["replace_network_acl_association"] = {
            "AssociationId": association, "NetworkAclId": acl["NetworkAclId"],
        }  # fmt: skip
    return attempts


def _disk_attempts(ec2: Any, instance: dict[str, Any]) -> Attempts:
    """Returns the calls that remove what machines leave: volumes, spot requests, and images of ours.

    Not cards: a machine's own carries no tag of ours, and only those that do may be deleted.
    """
    request = instance.get("SpotInstanceRequestId", SPOT_REQUEST)
    attempts: Attempts = {"cancel_spot_instance_requests": {"SpotInstanceRequestIds": [request]}}
    if volumes := [device["Ebs"]["VolumeId"] for device in instance["BlockDeviceMappings"] if "Ebs" in device]:
        attempts["delete_volume"] = {"VolumeId": volumes[0]}
    of_ours = [{"Name": "tag-key", "Values": [IMAGE_TAG]}]
    for image in ec2.describe_images(Owners=["self"], Filters=of_ours)["Images"][:1]:
        attempts["deregister_image"] = {"ImageId": image["ImageId"]}
        snapshots = [device.get("Ebs", {}).get("SnapshotId") for device in image["BlockDeviceMappings"]]
        if known := [snapshot for snapshot in snapshots if snapshot]:
            attempts["delete_snapshot"] = {"SnapshotId": known[0]}
    return attempts


def _tags(*kinds: str) -> list[dict[str, Any]]:
    return [{"ResourceType": kind, "Tags": TAGS} for kind in kinds]
