"""Asks EC2 for dry runs of all that provisioner does with an environment's resources.

EC2 answers DryRunOperation if the credentials allow the call, and UnauthorizedOperation if not (EC2 API reference,
"DryRun"). Any other error says nothing about rights. ModifyVpcAttribute and ModifySubnetAttribute know no dry runs, and
neither do EventBridge Scheduler and S3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from botocore.exceptions import ClientError

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
from provisioner.clouds.aws.cleanup import clean_up
from provisioner.clouds.aws.images import IMAGE_TAG

TAGS = [{"Key": OWNER_TAG, "Value": "dry-run"}, {"Key": ENVIRONMENT_TAG, "Value": "dry-run"}]
# The documentation's network (RFC 5737): no rule is ever made of it.
NETWORK = "192.0.2.0/24"
# Well-formed, and of no request: a user who may cancel this one may cancel any.
SPOT_REQUEST = "sir-00000000"


def refused(api: Api, region: str, environment: str) -> list[str]:
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
        instance = clean_up.instances(api, region, environment)[0]
        vpc, subnet = str(instance["VpcId"]), str(instance["SubnetId"])
        ours = [{"Name": "vpc-id", "Values": [vpc]}, {"Name": "tag-key", "Values": [OWNER_TAG]}]
        group = str(instance["SecurityGroups"][0]["GroupId"])
        table = str(ec2.describe_route_tables(Filters=ours)["RouteTables"][0]["RouteTableId"])
        acl = ec2.describe_network_acls(Filters=ours)["NetworkAcls"][0]
        attempts = _attempts(instance, vpc, subnet, group, table, acl)
        attempts |= _network_attempts(ec2, ours, vpc, subnet, table, acl) | _disk_attempts(ec2, instance)
    refusals = []
    for action, arguments in attempts.items():
        name = action.partition(" ")[0]
        call: Callable[..., Any] = getattr(ec2, name)
        with asking(f"A dry run of {action}"):
            try:
                call(**arguments, DryRun=True)
            except ClientError as error:
                if code_of(error) in REFUSED:
                    refusals.append(f"{action}: {error.response['Error'].get('Message', '')}"[:300])
                elif code_of(error) in (*NO_LOGIN, *THROTTLED):
                    raise
    return refusals


def _attempts(
    instance: dict[str, Any], vpc: str, subnet: str, group: str, table: str, acl: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Returns the arguments of each call, by boto3's name; what follows a space tells two of one name apart."""
    machine = {"InstanceId": instance["InstanceId"]}
    rule = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": NETWORK}]}
    entry = {"NetworkAclId": acl["NetworkAclId"], "RuleNumber": 32000, "Egress": False}
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
    return {
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
    }  # fmt: skip


def _network_attempts(
    ec2: Any, ours: list[dict[str, Any]], vpc: str, subnet: str, table: str, acl: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Returns the calls that change routes, gateways and what belongs together, with what exists in a VPC."""
    attached = [{"Name": "attachment.vpc-id", "Values": [vpc]}]
    gateway = str(ec2.describe_internet_gateways(Filters=attached)["InternetGateways"][0]["InternetGatewayId"])
    tables = ec2.describe_route_tables(Filters=ours)["RouteTables"]
    joined = [row for each in tables for row in each["Associations"] if row.get("SubnetId")]
    route = {"RouteTableId": table, "DestinationCidrBlock": NETWORK}
    between = {"InternetGatewayId": gateway, "VpcId": vpc}
    attempts: dict[str, dict[str, Any]] = {
        "create_route": {**route, "GatewayId": gateway},
        "delete_route": route,
        "associate_route_table": {"RouteTableId": table, "SubnetId": subnet},
        "attach_internet_gateway": between,
        "detach_internet_gateway": between,
        "delete_internet_gateway": {"InternetGatewayId": gateway},
    }
    if joined:
        attempts["disassociate_route_table"] = {"AssociationId": joined[0]["RouteTableAssociationId"]}
    if acl["Associations"]:
        association = acl["Associations"][0]["NetworkAclAssociationId"]
        attempts["replace_network_acl_association"] = {
            "AssociationId": association, "NetworkAclId": acl["NetworkAclId"],
        }  # fmt: skip
    return attempts


def _disk_attempts(ec2: Any, instance: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the calls that remove what machines leave: volumes, spot requests, and images of ours.

    Not cards: a machine's own carries no tag of ours, and only those that do may be deleted.
    """
    request = instance.get("SpotInstanceRequestId", SPOT_REQUEST)
    attempts: dict[str, dict[str, Any]] = {"cancel_spot_instance_requests": {"SpotInstanceRequestIds": [request]}}
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
