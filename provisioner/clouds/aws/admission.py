"""Lets a controller whose address has changed reach the machines that run.

What was created for its old address stays as it is: another controller may have that address, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from provisioner.clouds.aws import acl_rules
from provisioner.clouds.aws.api import Api, asking, tagged
from provisioner.clouds.aws.tagged_resources import ENVIRONMENT_TAG
from provisioner.models import Environment

# In a placement: the networks of the controller that created the environment, apart by spaces.
CONTROLLERS = "controllers"
SSH = 22
# Replies go to whatever port the controller's client chose.
REPLIES = {"From": 1024, "To": 65535}


def is_locked_out(placement: Mapping[str, str], own: Collection[str]) -> bool:
    """Whether an environment was created from other networks than the controller has now. Pure."""
    known = placement.get(CONTROLLERS, "").split()
    return bool(known) and not set(own) <= set(known)


def admit(api: Api, environment: Environment, own: Collection[str]) -> None:
    """Opens SSH for networks in an environment's security group and, if it has an allowlist, in its own subnet.

    Raises:
        HostError, InfrastructureError: AWS does not do it.
    """
    ec2, filters = api.client("ec2", environment.placement["region"]), tagged(ENVIRONMENT_TAG, environment.id)
    with asking(f"Letting this controller's new address in to {environment.id}"):
        for group in ec2.describe_security_groups(Filters=filters)["SecurityGroups"]:
            for cidr in sorted(set(own) - _sources(group)):
                rule = {"IpProtocol": "tcp", "FromPort": SSH, "ToPort": SSH, "IpRanges": [{"CidrIp": cidr}]}
                ec2.authorize_security_group_ingress(GroupId=group["GroupId"], IpPermissions=[rule])
        for table in ec2.describe_route_tables(Filters=filters)["RouteTables"]:
            _add_routes(ec2, table, own)
        for acl in ec2.describe_network_acls(Filters=filters)["NetworkAcls"]:
            _add_entries(ec2, acl, own)


def _sources(group: Mapping[str, Any]) -> set[str]:
    """The networks from which a group lets SSH in."""
    rules = [rule for rule in group["IpPermissions"] if rule.get("FromPort") == SSH]
    return {row["CidrIp"] for rule in rules for row in rule["IpRanges"]}


def _add_routes(ec2: Any, table: Mapping[str, Any], own: Collection[str]) -> None:
    ways = {row["DestinationCidrBlock"]: row.get("GatewayId", "") for row in table["Routes"]}
    gateway = next(way for way in ways.values() if way.startswith("igw-"))
    for cidr in sorted(set(own) - ways.keys()):
        ec2.create_route(RouteTableId=table["RouteTableId"], DestinationCidrBlock=cidr, GatewayId=gateway)


def _add_entries(ec2: Any, acl: Mapping[str, Any], own: Collection[str]) -> None:
    rows = [row for row in acl["Entries"] if row["RuleNumber"] < acl_rules.FIRST_OF_ALLOWLIST]
    present = {(row["Egress"], row["CidrBlock"]) for row in rows}
    known = {row["CidrBlock"]: row["RuleNumber"] for row in rows}
    numbers = acl_rules.numbered({*known, *own}, known)
    for egress, ports in ((True, REPLIES), (False, {"From": SSH, "To": SSH})):
        for cidr in own:
            if (egress, cidr) not in present:
                ec2.create_network_acl_entry(
                    NetworkAclId=acl["NetworkAclId"], RuleNumber=numbers[cidr], Protocol="6", RuleAction="allow",
                    Egress=egress, CidrBlock=cidr, PortRange=ports,
                )  # fmt: skip
