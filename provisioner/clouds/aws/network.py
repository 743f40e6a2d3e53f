"""A region's network, shared by all its environments. terraform/aws/network creates it; here it is found by tag.

A network ACL has 20 rules in each direction by default, with the last one that denies the rest (Amazon VPC user guide,
"Amazon VPC quotas": Rules per network ACL).

A controller whose address has changed is let in to the machines that run. What was created for its old address stays as
it is: another controller may have that address, too. Only where an environment's own network ACL has no room for both,
the new one takes the place of all others.
"""

from __future__ import annotations

import contextlib
import ipaddress
import time
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from hashlib import sha256
from typing import Any

from botocore.exceptions import ClientError

from provisioner.base.errors import HostError, InfrastructureError, UsageError
from provisioner.base.models import Environment, Record
from provisioner.clouds.aws.api import (
    ENVIRONMENT_TAG,
    HOME_TAG,
    OWNER_TAG,
    SHOWN_SECONDS,
    Api,
    asking,
    code_of,
    moment_of,
    tag,
    tagged,
)

NETWORK_TAG = "provisioner:network"
KIND_TAG = "provisioner:network-kind"
# Of the offline VPC's route table: behind it, a controller's network; its value, when that was last seen.
SEEN_TAG = "provisioner:seen:"
# Of each VPC's addresses, a subnet in each zone gets one of sixteen parts; a region has two to six zones. The offline
# VPC has eight parts for them.
SUBNET_PREFIX, ZONES = 20, 8
# The upper half of the offline VPC is for environments with an allowlist, 16 addresses each (AWS reserves five).
ALLOWLIST_BLOCK = ipaddress.IPv4Network("10.215.128.0/17")
ALLOWLIST_PREFIX = 28
REMOVAL_SECONDS = 60.0
# Of rules in each direction of a network ACL, and the code of the quota.
DEFAULT_RULES, RULES_QUOTA = 20, "L-2AEEBF1A"
# The last one, and in the shared ACL the one for neighbours.
DENIES = NEIGHBOURS = 1
FIRST_NUMBER = 100
# In the ACL of an environment with an allowlist, as terraform/aws/environment numbers it.
FIRST_OF_ALLOWLIST = 200
SSH = 22
# Replies go to whatever port the controller's client chose.
REPLIES = {"From": 1024, "To": 65535}
# In a placement: the networks of the controller that created the environment, apart by spaces.
CONTROLLERS = "controllers"
# What EC2 says of a rule or route that is there already.
ALREADY_THERE = ("InvalidPermission.Duplicate", "RouteAlreadyExists")
BLOCKED_HINT = (
    "An administrator switches VPC Block Public Access off there, or excludes the VPCs with the tag "
    f"{NETWORK_TAG} from it (VPC console, Settings). Or use another region."
)
Rows = list[dict[str, Any]]


class Network(Record):
    """What terraform/aws/network has created, by kind (online, offline).

    Args:
        subnets: zone -> subnet id, in the order of their addresses.
        controllers: networks from which controllers reach machines.
        parts: zone -> number of its subnets' part of the VPCs' addresses.
        numbers: the rules that these networks have in the offline VPC's ACL.
        seen: when these networks were last noted to be in use, as far as that is known.
        taken: networks of the offline VPC's subnets.
        home: the identity of the provisioner home that created it.
        owner: that home's operator.
    """

    vpcs: dict[str, str]
    gateways: dict[str, str]
    subnets: dict[str, dict[str, str]]
    parts: dict[str, int]
    controllers: frozenset[str]
    numbers: dict[str, int]
    seen: dict[str, datetime]
    taken: tuple[str, ...]
    home: str
    owner: str


def find_network(api: Api, region: str, home: str) -> Network | None:
    """Returns the region's network; None if it is missing or incomplete.

    Homes that began at the same moment have created one each: a home then uses its own, and others the first by its id.

    Args:
        home: the identity of the provisioner home that asks.
    """
    ec2 = api.client("ec2", region)
    of_region = tagged(NETWORK_TAG, region)
    with asking(f"Looking for the network in {region}"):
        found = ec2.describe_vpcs(Filters=of_region)["Vpcs"]
        if not found:
            return None
        inside = [{"Name": "vpc-id", "Values": [vpc["VpcId"] for vpc in found]}]
        pages = ec2.get_paginator("describe_subnets").paginate(Filters=inside)
        subnets = [subnet for page in pages for subnet in page["Subnets"]]
        gateways = ec2.describe_internet_gateways(Filters=of_region)["InternetGateways"]
        tables = ec2.describe_route_tables(Filters=of_region)["RouteTables"]
        acls = ec2.describe_network_acls(Filters=of_region)["NetworkAcls"]
    creators = list(dict.fromkeys(tag(vpc, HOME_TAG) for vpc in sorted(found, key=lambda vpc: vpc["VpcId"])))
    # An own one that EC2 does not show completely yet is no reason to use another: this controller is not let in there.
    for creator in [home] if home in creators else creators:
        own = [vpc for vpc in found if tag(vpc, HOME_TAG) == creator]
        if network := _network_of(region, own, subnets, gateways, tables, acls):
            return network
    return None


def _network_of(region: str, found: Rows, subnets: Rows, gateways: Rows, tables: Rows, acls: Rows) -> Network | None:
    """Returns the network that one home has created; None if it is incomplete."""
    vpcs = {tag(vpc, KIND_TAG): vpc["VpcId"] for vpc in found}
    if set(vpcs) != {"online", "offline"}:
        return None
    kinds = {vpc: kind for kind, vpc in vpcs.items()}
    subnets = sorted(subnets, key=lambda subnet: ipaddress.IPv4Network(subnet["CidrBlock"]))
    tables = [table for table in tables if table["VpcId"] == vpcs["offline"]]
    routes = [
        route
        for table in tables
        for route in table["Routes"]
        if "GatewayId" in route and "DestinationCidrBlock" in route
    ]
    controllers = frozenset(route["DestinationCidrBlock"] for route in routes if route["GatewayId"].startswith("igw-"))
    network = Network(
        vpcs=vpcs,
        gateways={
            kinds[attachment["VpcId"]]: gateway["InternetGatewayId"]
            for gateway in gateways
            for attachment in gateway["Attachments"]
            if attachment["VpcId"] in kinds
        },
        subnets={
            kind: {
                subnet["AvailabilityZone"]: subnet["SubnetId"]
                for subnet in subnets
                if subnet["VpcId"] == vpcs[kind] and tag(subnet, NETWORK_TAG) == region
            }
            for kind in vpcs
        },
        parts={
            subnet["AvailabilityZone"]: _part(subnet["CidrBlock"])
            for subnet in subnets
            if subnet["VpcId"] in kinds and tag(subnet, NETWORK_TAG) == region
        },
        controllers=controllers,
        numbers={
            entry["CidrBlock"]: entry["RuleNumber"]
            for acl in acls
            if acl["VpcId"] == vpcs["offline"]
            for entry in acl["Entries"]
            if entry.get("CidrBlock") in controllers and not entry["Egress"]
        },
        seen={
            label["Key"].removeprefix(SEEN_TAG): moment
            for table in tables
            for label in table["Tags"]
            if label["Key"].startswith(SEEN_TAG) and (moment := moment_of(label["Value"]))
        },
        taken=tuple(subnet["CidrBlock"] for subnet in subnets if subnet["VpcId"] == vpcs["offline"]),
        home=tag(found[0], HOME_TAG),
        owner=tag(found[0], OWNER_TAG),
    )
    complete = set(network.gateways) == set(vpcs) and all(len(zones) >= 2 for zones in network.subnets.values())
    return network if complete else None


def _part(cidr: str) -> int:
    """Returns the number of a subnet's part of its VPC's addresses."""
    return int(ipaddress.IPv4Network(cidr).network_address) >> (32 - SUBNET_PREFIX) & 15


def zone_parts(zones: Collection[str], known: Mapping[str, int]) -> dict[str, int]:
    """Gives each zone its part of the VPCs' addresses. Pure.

    A zone that has one keeps it: its subnets may be in use. The lowest free part goes to the first zone by name, so
    that a zone whose subnets EC2 does not show yet gets the same part again.

    Args:
        zones: those that are to have subnets.
        known: the parts of those that have some.
    """
    free = (part for part in range(ZONES) if part not in known.values())
    new = (zone for zone in sorted(zones) if zone not in known)
    return {**known, **dict(zip(new, free, strict=False))}


class Networks:
    """The networks of regions, each looked up once.

    Args:
        api: the account's.
        home: the identity of the provisioner home.
    """

    def __init__(self, api: Api, home: str) -> None:
        self._api = api
        self._home = home
        self._known: dict[str, Network] = {}

    def keep(self, region: str, network: Network) -> None:
        """Remembers a region's network as it is now."""
        self._known[region] = network

    def forget(self, region: str) -> None:
        """Forgets a region's network: `get` looks it up again."""
        self._known.pop(region, None)

    def get(self, region: str) -> Network:
        """Returns a region's network.

        Raises:
            InfrastructureError: it does not exist, or not completely.
        """
        network = self._find(region)
        if network is None:  # it may have been created just now
            time.sleep(SHOWN_SECONDS)
            network = self._find(region)
        if network is None:
            raise InfrastructureError(f"The network in {region} is missing or incomplete.")
        return network

    def zones(self, region: str) -> list[str]:
        """Returns the zones that have subnets, or that will get them."""
        network = self._find(region)
        return list(network.subnets["online"]) if network else zones_of(self._api, region)

    def controllers(self, region: str) -> frozenset[str]:
        """Returns the networks from which controllers reach a region's machines; none before the network exists."""
        network = self._find(region)
        return network.controllers if network else frozenset()

    def taken(self, region: str) -> tuple[str, ...]:
        """Returns the networks of the offline VPC's subnets, as far as they are known without asking."""
        return self._known[region].taken if region in self._known else ()

    def _find(self, region: str) -> Network | None:
        if region not in self._known and (network := find_network(self._api, region, self._home)):
            self._known[region] = network
        return self._known.get(region)


def remove_network(api: Api, region: str, home: str) -> None:
    """Removes what a home has created of a region's network, if nothing uses it. Safe to repeat.

    What all homes share, the schedules' group and role, stays.

    Args:
        home: the identity of the provisioner home.

    Raises:
        InfrastructureError: something uses it; nothing was removed.
    """
    ec2 = api.client("ec2", region)
    deadline = time.monotonic() + REMOVAL_SECONDS
    with asking(f"Removing the incomplete network in {region}"):
        while True:
            try:
                return _remove(ec2, region, [*tagged(NETWORK_TAG, region), *tagged(HOME_TAG, home)])
            except ClientError as error:  # by what EC2 did not show yet
                if code_of(error) != "DependencyViolation" or time.monotonic() > deadline:
                    raise
            time.sleep(SHOWN_SECONDS)


def _remove(ec2: Any, region: str, of_home: list[dict[str, Any]]) -> None:
    vpcs = [vpc["VpcId"] for vpc in ec2.describe_vpcs(Filters=of_home)["Vpcs"]]
    if vpcs and (users := _users(ec2, vpcs)):
        raise InfrastructureError(
            f"The network in {region} cannot be rebuilt while environments use it: {', '.join(users[:5])}.",
            hint="Destroy these environments (`provisioner list` and `sweep`, here and on the other controllers), "
            "and try again.",
        )
    # First, and with them their associations. AWS refuses if one has come into use.
    for subnet in ec2.describe_subnets(Filters=of_home)["Subnets"]:
        ec2.delete_subnet(SubnetId=subnet["SubnetId"])
    for acl in ec2.describe_network_acls(Filters=of_home)["NetworkAcls"]:
        ec2.delete_network_acl(NetworkAclId=acl["NetworkAclId"])
    for table in ec2.describe_route_tables(Filters=of_home)["RouteTables"]:
        ec2.delete_route_table(RouteTableId=table["RouteTableId"])
    for gateway in ec2.describe_internet_gateways(Filters=of_home)["InternetGateways"]:
        for attachment in gateway["Attachments"]:
            ec2.detach_internet_gateway(InternetGatewayId=gateway["InternetGatewayId"], VpcId=attachment["VpcId"])
        ec2.delete_internet_gateway(InternetGatewayId=gateway["InternetGatewayId"])
    for vpc in vpcs:
        ec2.delete_vpc(VpcId=vpc)


def let_in(api: Api, region: str, network: Network) -> frozenset[str]:
    """Returns the networks that an environment's security group in a region's network lets in."""
    inside = [{"Name": "vpc-id", "Values": list(network.vpcs.values())}]
    with asking(f"Looking for environments in {region}"):
        groups = api.client("ec2", region).describe_security_groups(Filters=inside)["SecurityGroups"]
    rules = [rule for group in groups for rule in group["IpPermissions"] if rule.get("FromPort") == SSH]
    return frozenset(row["CidrIp"] for rule in rules for row in rule["IpRanges"])


def users_of(api: Api, region: str, network: Network) -> list[str]:
    """Lists what environments, of any home, have in a region's network."""
    with asking(f"Looking for environments in {region}"):
        return _users(api.client("ec2", region), list(network.vpcs.values()))


def _users(ec2: Any, vpcs: list[str]) -> list[str]:
    """What environments, of any home, have in VPCs."""
    inside = [{"Name": "vpc-id", "Values": vpcs}]
    cards = ec2.describe_network_interfaces(Filters=inside)["NetworkInterfaces"]
    groups = ec2.describe_security_groups(Filters=inside)["SecurityGroups"]
    subnets = ec2.describe_subnets(Filters=inside)["Subnets"]
    return [
        *(f"security group {group['GroupName']}" for group in groups if group["GroupName"] != "default"),
        *(f"network interface {card['NetworkInterfaceId']}" for card in cards),
        *(f"subnet {subnet['SubnetId']}" for subnet in subnets if not tag(subnet, NETWORK_TAG)),
    ]


def zones_of(api: Api, region: str) -> list[str]:
    """Lists the availability zones that get subnets.

    Raises:
        InfrastructureError: there are fewer than two.
    """
    filters = [{"Name": "state", "Values": ["available"]}, {"Name": "zone-type", "Values": ["availability-zone"]}]
    with asking(f"Listing the zones of {region}"):
        zones = api.client("ec2", region).describe_availability_zones(Filters=filters)["AvailabilityZones"]
    names = sorted(zone["ZoneName"] for zone in zones)[:ZONES]
    if len(names) < 2:
        raise InfrastructureError(
            f"{region} has fewer than two availability zones.", hint="Use another region.", settings=("region",)
        )
    return names


def blocked_access(api: Api, region: str) -> str:
    """Says that VPC Block Public Access keeps controllers from machines; empty if not, or if EC2 does not say."""
    ec2 = api.client("ec2", region)
    with contextlib.suppress(HostError, InfrastructureError), asking("Looking for VPC Block Public Access"):
        mode = ec2.describe_vpc_block_public_access_options()["VpcBlockPublicAccessOptions"]["InternetGatewayBlockMode"]
        subnets = ec2.describe_subnets(Filters=tagged(NETWORK_TAG, region))["Subnets"] if mode != "off" else []
        # Each subnet tells its own: its VPC may be excluded.
        own = {subnet.get("BlockPublicAccessStates", {}).get("InternetGatewayBlockMode", mode) for subnet in subnets}
        if mode != "off" and own != {"off"}:
            return f"VPC Block Public Access is on in {region} ({mode}): no machine can be reached from outside AWS."
    return ""


def allowlist_subnet(environment_id: str, taken: Collection[str]) -> str:
    """Picks a free network in the offline VPC for an environment with an allowlist. Pure.

    Raises:
        InfrastructureError: none is free.
    """
    count = 1 << (ALLOWLIST_PREFIX - ALLOWLIST_BLOCK.prefixlen)
    first = int.from_bytes(sha256(environment_id.encode()).digest()[:4], "big")
    step = 1 << (32 - ALLOWLIST_PREFIX)
    for number in range(count):
        offset = (first + number) % count * step
        network = f"{ALLOWLIST_BLOCK.network_address + offset}/{ALLOWLIST_PREFIX}"
        if network not in taken:
            return network
    raise InfrastructureError("The offline VPC has no room for another environment with an allowlist.")


def rules_fit(api: Api, region: str, rules: int) -> bool:
    """Whether a network ACL of a region holds so many rules. AWS is asked only about more than the default."""
    return rules <= DEFAULT_RULES or rules <= rules_quota(api, region)


def rules_quota(api: Api, region: str) -> int:
    """Returns how many rules a network ACL holds in each direction; the default if AWS does not say."""
    try:
        with asking("Asking for the quota of network ACLs"):
            client = api.client("service-quotas", region)
            return int(client.get_service_quota(ServiceCode="vpc", QuotaCode=RULES_QUOTA)["Quota"]["Value"])
    except (HostError, InfrastructureError, UsageError):
        return DEFAULT_RULES


def numbered(controllers: Collection[str], known: Mapping[str, int]) -> dict[str, int]:
    """Gives each controller's network the number of its rules. Those that have one keep it, and lose no packet. Pure.

    Args:
        known: the numbers that are in force.
    """
    kept = {cidr: number for cidr, number in known.items() if cidr in controllers}
    free = (number for number in range(FIRST_NUMBER, 1 << 15) if number not in kept.values())
    return kept | {cidr: next(free) for cidr in sorted(controllers) if cidr not in kept}


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
        if code_of(error) not in ALREADY_THERE:
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
