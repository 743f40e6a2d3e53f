"""Reads back from EC2's API what surrounds an environment's machines, and has it compared with its permission."""

from __future__ import annotations

import time

from provisioner.clouds.aws.account import Account
from provisioner.clouds.aws.api import Api, asking
from provisioner.clouds.aws.cleanup import tagged_resources
from provisioner.clouds.aws.network.isolation_rules import Seen, compare, require_running
from provisioner.clouds.aws.network.region import Networks
from provisioner.clouds.defaults import Isolation
from provisioner.models import Environment

# EC2's answers are eventually consistent, and another controller may be joining the network at this moment.
LOOKS = 3
PAUSE_SECONDS = 2.0


class AwsIsolation(Isolation):
    """What EC2's API says of environments in one account."""

    account: Account
    networks: Networks

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
    known = tagged_resources.instances(api, region, environment.id)
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
