"""Lets a controller whose address has changed reach the machines that run.

What was created for its old address stays as it is: another controller may have that address, too. Only where an
environment's own network ACL has no room for both, the new one takes the place of all others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from botocore.exceptions import ClientError

from provisioner.clouds.aws.api import ENVIRONMENT_TAG, Api, asking, code_of, tagged
from provisioner.clouds.aws.network import DENIES, FIRST_OF_ALLOWLIST, numbered, rules_fit
from provisioner.models import Environment

# In a placement: the networks of the controller that created the environment, apart by spaces.
CONTROLLERS = "controllers"
SSH = 22
_DONE = ("InvalidPermission.Duplicate", "RouteAlreadyExists")
# Replies go to whatever port the controller's client chose.
REPLIES = {"From": 1024, "To": 65535}


def admit(api: Api, environment: Environment, own: Collection[str]) -> None:
    """Opens SSH for networks in an environment's security group and, if it has an allowlist, in its own subnet.

    Raises:
        HostError, InfrastructureError: AWS does not do it.
    """
    region = environment.placement["region"]
    ec2, filters = api.client("ec2", region), tagged(ENVIRONMENT_TAG, environment.id)
    with asking(f"Letting this controller's new address in to {environment.id}"):
        for group in ec2.describe_security_groups(Filters=filters)["SecurityGroups"]:
            rules = [rule for rule in group["IpPermissions"] if rule.get("FromPort") == SSH]
            for cidr in sorted(set(own) - {row["CidrIp"] for rule in rules for row in rule["IpRanges"]}):
                rule = {"IpProtocol": "tcp", "FromPort": SSH, "ToPort": SSH, "IpRanges": [{"CidrIp": cidr}]}
                with _unless_done():
                    ec2.authorize_security_group_ingress(GroupId=group["GroupId"], IpPermissions=[rule])
        tables = ec2.describe_route_tables(Filters=filters)["RouteTables"]
        for acl in ec2.describe_network_acls(Filters=filters)["NetworkAcls"]:
            incoming = [
                row["CidrBlock"] for row in acl["Entries"] if not row["Egress"] and row["RuleAction"] == "allow"
            ]
            new = set(own) - set(incoming)
            if not rules_fit(api, region, len(incoming) + len(new) + DENIES):
                _forget_others(ec2, acl, tables, own)
            _add_entries(ec2, acl, own)
        for table in tables:
            _add_routes(ec2, table, own)


@contextlib.contextmanager
def _unless_done() -> Iterator[None]:
    """Accepts that something is there already: EC2 did not show it yet, or the reply to a first request was lost."""
    try:
        yield
    except ClientError as error:
        if code_of(error) not in _DONE:
            raise


def _forget_others(
    ec2: Any, acl: Mapping[str, Any], tables: Collection[Mapping[str, Any]], own: Collection[str]
) -> None:
    """Removes the rules and the routes of all controllers' networks but these."""
    rules = [row for row in acl["Entries"] if row["RuleNumber"] < FIRST_OF_ALLOWLIST]
    others = {row["CidrBlock"] for row in rules} - set(own)
    for row in rules:
        if row["CidrBlock"] in others:
            ec2.delete_network_acl_entry(
                NetworkAclId=acl["NetworkAclId"], RuleNumber=row["RuleNumber"], Egress=row["Egress"]
            )
    allowed = {row.get("CidrBlock") for row in acl["Entries"] if row not in rules}
    for table in tables:
        for route in table["Routes"]:
            if (network := route.get("DestinationCidrBlock")) in others - allowed:
                ec2.delete_route(RouteTableId=table["RouteTableId"], DestinationCidrBlock=network)


def _add_routes(ec2: Any, table: Mapping[str, Any], own: Collection[str]) -> None:
    ways = {row["DestinationCidrBlock"]: row.get("GatewayId", "") for row in table["Routes"]}
    gateway = next(way for way in ways.values() if way.startswith("igw-"))
    for cidr in sorted(set(own) - ways.keys()):
        with _unless_done():
            ec2.create_route(RouteTableId=table["RouteTableId"], DestinationCidrBlock=cidr, GatewayId=gateway)


def _add_entries(ec2: Any, acl: Mapping[str, Any], own: Collection[str]) -> None:
    rows = [row for row in acl["Entries"] if row["RuleNumber"] < FIRST_OF_ALLOWLIST]
    present = {(row["Egress"], row["CidrBlock"]) for row in rows}
    known = {row["CidrBlock"]: row["RuleNumber"] for row in rows}
    numbers = numbered({*known, *own}, known)
    for egress, ports in ((True, REPLIES), (False, {"From": SSH, "To": SSH})):
        for cidr in own:
            if (egress, cidr) not in present:
                ec2.create_network_acl_entry(
                    NetworkAclId=acl["NetworkAclId"], RuleNumber=numbers[cidr], Protocol="6", RuleAction="allow",
                    Egress=egress, CidrBlock=cidr, PortRange=ports,
                )  # fmt: skip
