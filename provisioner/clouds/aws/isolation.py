"""Reads back from EC2's API what surrounds an environment's machines, and has it compared with its permission."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from provisioner.base.errors import MachineLostError
from provisioner.base.models import Environment
from provisioner.clouds.aws import cleanup
from provisioner.clouds.aws.account import Account
from provisioner.clouds.aws.api import ENVIRONMENT_TAG, Api, asking, tag
from provisioner.clouds.aws.instance_watch import metadata_is_off
from provisioner.clouds.aws.network import Network, Networks

# terraform/aws/network: the offline VPC, and the widest network of a controller.
OFFLINE = "10.215.0.0/16"
SHORTEST_PREFIX = 8
INTERNET = "0.0.0.0/0"
_PROTOCOLS = {"-1": "all", "6": "tcp", "17": "udp", "1": "icmp"}
# Replies go to whatever port the client chose: network ACLs are stateless.
_REPLIES = "tcp 1024-65535"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Seen:
    """What the API describes, in its own terms.

    Args:
        instances: those with the environment's tag that are not terminated.
        groups: the security groups of their interfaces.
        members: ids of all interfaces in these groups.
        tables: the route tables of their subnets.
        acls: the network ACLs of their subnets.
        resolver: whether their VPC has a resolver.
    """

    instances: tuple[Row, ...]
    groups: tuple[Row, ...]
    members: frozenset[str]
    tables: tuple[Row, ...]
    acls: tuple[Row, ...]
    resolver: bool


def require_running(instances: Iterable[Row], environment: Environment) -> None:
    """Makes sure that all machines of the record run: the network of one that is ending says nothing.

    Args:
        instances: those with the environment's tag that are not terminated.

    Raises:
        MachineLostError: one does not, such as after a spot interruption.
    """
    states = {instance["InstanceId"]: instance["State"]["Name"] for instance in instances}
    for role, endpoint in environment.endpoints.items():
        state = states.get(endpoint.instance_id, "gone")
        if state != "running":
            raise MachineLostError(f"The {role} machine was lost: its instance {endpoint.instance_id} is {state}.")


def compare(seen: Seen, environment: Environment, network: Network) -> list[str]:
    """Returns a line for each difference.

    Args:
        network: the region's, as it was found before.
    """
    differences = [*_instances(seen, environment, network), *_groups(seen, environment, network)]
    if len(seen.tables) != 1:
        return [*differences, f"the environment has {len(seen.tables)} route tables instead of one"]
    routes = _routes(seen.tables[0])
    if environment.full_internet:
        expected = {f"{INTERNET} by {network.gateways['online']}"}
        return [*differences, *_unequal("the route table", routes, expected)]
    if seen.resolver:
        differences.append("the VPC's resolver is on")
    gateway = network.gateways["offline"]
    allowed = {destination.cidr for destination in environment.allowed_destinations}
    ways_out = {route.removesuffix(f" by {gateway}") for route in routes if route.endswith(f" by {gateway}")}
    # Another controller may have joined the shared network in the meantime. Route and ACL then agree.
    controllers = ways_out - allowed
    expected_routes = {f"{cidr} by {gateway}" for cidr in (network.controllers & controllers) | allowed}
    differences += _unequal("the route table", routes, expected_routes)
    differences += [f"the route to {cidr} is too wide" for cidr in sorted(controllers) if _is_too_wide(cidr)]
    if len(seen.acls) != 1:
        return [*differences, f"the environment has {len(seen.acls)} network ACLs instead of one"]
    entries = _expected_entries(environment, controllers)
    return [*differences, *_unequal("the network ACL", _entries(seen.acls[0]), entries)]


def _expected_entries(environment: Environment, controllers: Iterable[str]) -> set[str]:
    """Returns the lines of the network ACL of an environment without internet."""
    entries = set()
    for cidr in controllers:
        entries |= {f"in tcp 22 from {cidr}", f"out {_REPLIES} to {cidr}"}
    for destination in environment.allowed_destinations:
        entries |= {f"out tcp {destination.port} to {destination.cidr}", f"in {_REPLIES} from {destination.cidr}"}
    if not environment.allowed_destinations:  # the ACL of the subnets that environments share
        entries |= {f"in all from {OFFLINE}", f"out all to {OFFLINE}"}
    return entries


def _unequal(what: str, seen: set[str], expected: set[str]) -> list[str]:
    return [
        *(f"{what} has: {line}" for line in sorted(seen - expected)),
        *(f"{what} lacks: {line}" for line in sorted(expected - seen)),
    ]


def _is_too_wide(cidr: str) -> bool:
    try:
        return ipaddress.IPv4Network(cidr).prefixlen < SHORTEST_PREFIX
    except ValueError:  # IPv6, or a list of AWS's
        return True


def _instances(seen: Seen, environment: Environment, network: Network) -> Iterable[str]:
    """Yields what is wrong with the machines themselves."""
    roles = {endpoint.instance_id: role for role, endpoint in environment.endpoints.items()}
    kind = "online" if environment.full_internet else "offline"
    if {instance["InstanceId"] for instance in seen.instances} != set(roles):
        yield "other instances carry its tag than its record names"
        return
    for instance in seen.instances:
        role = roles[instance["InstanceId"]]
        public = environment.has_way_out or role == "primary"
        interfaces = instance["NetworkInterfaces"]
        facts = {
            "is in another VPC": instance["VpcId"] != network.vpcs[kind],
            "does not have exactly one network interface": len(interfaces) != 1,
            "has an instance profile": "IamInstanceProfile" in instance,
            "has its metadata service on": not metadata_is_off([instance], [instance["InstanceId"]]),
            "forwards packets of others": not all(interface.get("SourceDestCheck") for interface in interfaces),
            "has IPv6 addresses": any(interface.get("Ipv6Addresses") for interface in interfaces),
            "has further addresses": any(len(row["PrivateIpAddresses"]) != 1 for row in interfaces),
            "has a public address": not public and bool(instance.get("PublicIpAddress")),
        }
        yield from (f"the {role} machine {fact}" for fact, holds in facts.items() if holds)


def _groups(seen: Seen, environment: Environment, network: Network) -> Iterable[str]:
    """Yields what is wrong with the security group and its members."""
    if [tag(group, ENVIRONMENT_TAG) for group in seen.groups] != [environment.id]:
        yield "its machines are not in exactly one security group, the environment's"
        return
    [group] = seen.groups
    interfaces = [interface for instance in seen.instances for interface in instance["NetworkInterfaces"]]
    if any([row["GroupId"] for row in interface["Groups"]] != [group["GroupId"]] for interface in interfaces):
        yield "its machines are not in exactly one security group, the environment's"
    if seen.members != {interface["NetworkInterfaceId"] for interface in interfaces}:
        yield "its security group has other members than its machines"
    rules = _group_rules(group)
    expected = {"in all from the group", "out all to the group"}
    expected |= {f"out tcp {row.port} to {row.cidr}" for row in environment.allowed_destinations}
    expected |= {f"out all to {INTERNET}"} if environment.full_internet else set()
    from_controllers = {f"in tcp 22 from {cidr}" for cidr in network.controllers if not _is_too_wide(cidr)}
    yield from _unequal("the security group", rules, expected | (from_controllers & rules))


def _group_rules(group: Row) -> set[str]:
    lines = set()
    for permissions, way in ((group["IpPermissions"], "in {} from {}"), (group["IpPermissionsEgress"], "out {} to {}")):
        for permission in permissions:
            what = _ports(permission["IpProtocol"], permission.get("FromPort"), permission.get("ToPort"))
            others = [row["GroupId"] for row in permission.get("UserIdGroupPairs", [])]
            targets = ["the group" if other == group["GroupId"] else other for other in others]
            targets += [row["CidrIp"] for row in permission.get("IpRanges", [])]
            targets += [row["CidrIpv6"] for row in permission.get("Ipv6Ranges", [])]
            targets += [row["PrefixListId"] for row in permission.get("PrefixListIds", [])]
            lines |= {way.format(what, target) for target in targets}
    return lines


def _entries(acl: Row) -> set[str]:
    lines = set()
    for entry in acl["Entries"]:
        if entry["RuleAction"] != "allow":
            continue
        ports = entry.get("PortRange", {})
        what = _ports(str(entry["Protocol"]), ports.get("From"), ports.get("To"))
        target = entry.get("CidrBlock") or entry.get("Ipv6CidrBlock")
        lines.add(f"out {what} to {target}" if entry["Egress"] else f"in {what} from {target}")
    return lines


def _ports(protocol: str, first: int | None, last: int | None) -> str:
    name = _PROTOCOLS.get(protocol, protocol)
    if name == "all" or first is None:
        return name
    return f"{name} {first}" if first == last else f"{name} {first}-{last}"


def _routes(table: Row) -> set[str]:
    """Returns the routes that leave the VPC."""
    lines = set()
    for route in table["Routes"]:
        destinations = ("DestinationCidrBlock", "DestinationIpv6CidrBlock", "DestinationPrefixListId")
        destination = next((route[key] for key in destinations if route.get(key)), "somewhere")
        ways = [str(value) for key, value in sorted(route.items()) if key.endswith("Id") and key not in destinations]
        if ways != ["local"]:
            lines.add(f"{destination} by {' '.join(ways) or 'nothing'}")
    return lines


# EC2's answers are eventually consistent, and another controller may be joining the network at this moment.
LOOKS = 3
PAUSE_SECONDS = 2.0


class AwsIsolation:
    """What EC2's API says of environments in one account."""

    account: Account
    networks: Networks
    is_silent = True  # security groups and network ACLs drop packets (Amazon VPC user guide)

    def ways_to_controllers(self, environment: Environment) -> tuple[str, ...]:
        """Returns the first address of each controller's network: the offline VPC has routes there."""
        known = self.networks.controllers(environment.placement["region"]) | self.account.controllers
        return tuple(str(next(iter(ipaddress.IPv4Network(cidr).hosts()))) for cidr in sorted(known))

    def isolation_differences(self, environment: Environment) -> list[str]:
        """Compares instances, security group, routes, network ACL and resolver with what the permission calls for.

        Raises:
            MachineLostError: a machine is ending, or gone, such as after a spot interruption.
        """
        region = environment.placement["region"]
        differences: list[str] = []
        for look in range(LOOKS):
            if look:
                time.sleep(PAUSE_SECONDS)
                self.networks.forget(region)
            seen = _look(self.account.api, region, environment)
            network = self.networks.get(region)
            # A controller whose address has changed since the creation has let the new one in.
            known = network.model_copy(update={"controllers": network.controllers | self.account.controllers})
            differences = compare(seen, environment, known)
            if not differences:
                break
        return differences


def _look(api: Api, region: str, environment: Environment) -> Seen:
    """Asks EC2.

    Raises:
        MachineLostError: a machine is ending, or gone.
        HostError, InfrastructureError: it does not answer.
    """
    known = cleanup.instances(api, region, environment.id)
    instances = [instance for instance in known if instance["State"]["Name"] != "terminated"]
    require_running(instances, environment)
    interfaces = [interface for instance in instances for interface in instance["NetworkInterfaces"]]
    groups = sorted({group["GroupId"] for interface in interfaces for group in interface["Groups"]})
    subnets = sorted({interface["SubnetId"] for interface in interfaces})
    ec2 = api.client("ec2", region)
    of_groups = [{"Name": "group-id", "Values": groups}]
    of_subnets = [{"Name": "association.subnet-id", "Values": subnets}]
    with asking(f"Reading back the network of {environment.id}"):
        resolvers = [
            ec2.describe_vpc_attribute(VpcId=vpc, Attribute="enableDnsSupport")["EnableDnsSupport"]["Value"]
            for vpc in sorted({instance["VpcId"] for instance in instances})
        ]
        return Seen(
            instances=tuple(instances),
            groups=tuple(ec2.describe_security_groups(Filters=of_groups)["SecurityGroups"]),
            members=frozenset(
                interface["NetworkInterfaceId"]
                for interface in ec2.describe_network_interfaces(Filters=of_groups)["NetworkInterfaces"]
            ),
            tables=tuple(ec2.describe_route_tables(Filters=of_subnets)["RouteTables"]),
            acls=tuple(ec2.describe_network_acls(Filters=of_subnets)["NetworkAcls"]),
            resolver=any(resolvers),
        )
