"""What Terraform is given on AWS: the region's shared network, each environment's variables, and the credentials."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

from provisioner.base.clock import now
from provisioner.base.errors import HostError, UsageError
from provisioner.base.models import Destination, Environment, Record, Role
from provisioner.clouds.aws import images, schedules
from provisioner.clouds.aws.account import BACKEND, Account
from provisioner.clouds.aws.api import HOME_TAG, OWNER_TAG, SHOWN_SECONDS, Api, timestamp
from provisioner.clouds.aws.machines import user_data_path
from provisioner.clouds.aws.network import (
    CONTROLLERS,
    DENIES,
    NEIGHBOURS,
    NETWORK_TAG,
    Network,
    Networks,
    find_network,
    let_in,
    numbered,
    remove_network,
    rules_fit,
    rules_quota,
    users_of,
    zone_parts,
    zones_of,
)
from provisioner.clouds.cloud import UNFINISHED, ModuleVariables, SharedNetwork, StackValues, TerraformType
from provisioner.store.files import locked, write_atomically
from provisioner.store.images import ImageStore

# RunInstances has a bucket of five tokens, which gets two a second (Amazon EC2 developer guide, "Request throttling for
# the Amazon EC2 API"). Terraform limits the requests of one apply, and cannot know of the others.
BUCKET = 5
PER_SECOND = 2.0
# A caller that waits longer is told why.
TOLD_SECONDS = 5.0
# The clock counts from the host's boot: what lies further ahead was noted before the last one.
AHEAD_SECONDS = 3600.0
CHECK_SECONDS = 0.5
# Half a day after it was noted that a controller is in use, its next command notes it again.
NOTED, FORGOTTEN, NEVER = timedelta(hours=12), timedelta(days=1), datetime.min.replace(tzinfo=UTC)
# By these, programs find credentials of their own (AWS SDKs and Tools reference guide, "Environment variables").
OWN_SEARCH = (
    "AWS_ACCESS_KEY", "AWS_CONTAINER_", "AWS_CREDENTIAL_", "AWS_DEFAULT_PROFILE", "AWS_PROFILE", "AWS_ROLE_",
    "AWS_SECRET_", "AWS_SECURITY_TOKEN", "AWS_SESSION_TOKEN", "AWS_WEB_IDENTITY_",
)  # fmt: skip


class AllowlistSubnet(Record):
    """Where the subnet of an environment with an allowlist lies.

    Args:
        cidr: its network.
        zone: its availability zone.
        gateway_id: the offline VPC's internet gateway.
    """

    cidr: str
    zone: str
    gateway_id: str


class AwsVariables(ModuleVariables):
    """The variables that only terraform/aws/environment takes; its variables.tf describes them."""

    vpc_id: Annotated[str, TerraformType("string")]
    subnet_id: Annotated[str, TerraformType("string")]
    controller_cidrs: Annotated[tuple[str, ...], TerraformType("set(string)")]
    controller_rules: Annotated[dict[str, int], TerraformType("map(number)")]
    instance_types: Annotated[dict[Role, str], TerraformType("map(string)")]
    user_data: Annotated[dict[Role, str], TerraformType("map(string)")]
    spot: Annotated[bool, TerraformType("bool")]
    allowlist: Annotated[
        AllowlistSubnet | None, TerraformType("object({ cidr = string, zone = string, gateway_id = string })")
    ]
    expires_at: Annotated[str, TerraformType("string")]
    scheduler_role_arn: Annotated[str, TerraformType("string")]
    tags: Annotated[dict[str, str], TerraformType("map(string)")]


class AwsStacks:
    """Stacks in one account."""

    account: Account
    networks: Networks
    store: ImageStore
    regions_with_schedules: set[str]
    """Where this process knows that the schedules' role and group exist."""
    parallelism: int | None = BUCKET  # no apply asks for more at once than EC2 takes at once

    def terraform_variables(self, ours: Mapping[str, str]) -> dict[str, str]:
        """Returns variables of the AWS SDKs, with the credentials that boto3 finds now."""
        return terraform_variables(self.account.api, ours)

    def acquire_launches(
        self, environment: Environment, machines: int, tell: Callable[[str], None], check: Callable[[], None]
    ) -> None:
        """Keeps the launches of all commands of this home within EC2's rate for the region."""
        name = f"launches-{self.account.identity.account}-{environment.placement['region']}"
        await_turn(self.account.home.locks / name, machines, tell, check)

    def stack_values(self, environment: Environment) -> StackValues:
        """Returns AMIs, network, instance types, user data, schedule and tags, and the root's provider and backend."""
        account, placement = self.account, environment.placement
        network = self.networks.get(placement["region"])
        # Another controller that takes the environment over lets itself in.
        own = placement[CONTROLLERS].split()
        numbers = numbered({*network.controllers, *own}, network.numbers)
        kind = "online" if environment.full_internet else "offline"
        allowlist = None
        if environment.allowed_destinations:
            allowlist = AllowlistSubnet(
                cidr=placement["allowlist"], zone=placement["zone"], gateway_id=network.gateways["offline"]
            )
        variables = AwsVariables(
            vpc_id=network.vpcs[kind],
            subnet_id=network.subnets[kind][placement["zone"]],
            controller_cidrs=tuple(own),
            controller_rules={cidr: numbers[cidr] for cidr in own},
            instance_types={role: placement[role] for role in environment.machines},
            user_data={
                role: user_data_path(account.home, environment, role).read_text() for role in environment.machines
            },
            spot=placement["market"] == "spot",
            allowlist=allowlist,
            expires_at=schedules.moment(environment.expires_at),
            scheduler_role_arn=schedules.role_arn(account.identity.account),
            tags=account.tags(environment),
        )
        amis = {
            role: images.ami_id(account, self.store, machine.image) for role, machine in environment.machines.items()
        }
        root_files = account.root_files(placement["region"], environment.stack)
        return StackValues(images=amis, variables=variables, root_files=root_files)

    def shared_network(self, environment: Environment) -> SharedNetwork | None:
        """Returns the region's network if it is missing, incomplete, or closed to this controller's address.

        The schedules' group is created here if it is missing, as it belongs to no network and no home.

        Raises:
            HostError: another controller created it, and its state is not shared; or an administrator has not set the
                account up.
        """
        account, region = self.account, environment.placement["region"]
        if region not in self.regions_with_schedules:
            schedules.require_role(account.api, account.identity.account)
            schedules.require_group(account.api, region)
            self.regions_with_schedules.add(region)
        stack = f"network-aws-{account.identity.account}-{region}"
        directory = account.home.stacks / stack
        interrupted = (directory / UNFINISHED).exists()
        network = find_network(account.api, region, account.home.identity)
        if network is None and directory.exists() and not interrupted:  # it may have been created just now
            time.sleep(SHOWN_SECONDS)
            network = find_network(account.api, region, account.home.identity)
        known = network.controllers if network else frozenset()
        owned = directory.exists() and network is not None and network.home == account.home.identity
        may_change = bool(account.state) or owned or interrupted
        root_files = account.root_files(region, stack)
        is_noted = network and all(now() - network.seen.get(cidr, NEVER) < NOTED for cidr in account.controllers)
        may_stay = is_noted or not _is_kept(directory, root_files)
        if network and account.controllers <= known and not interrupted and may_stay:
            self.networks.keep(region, network)
            return None
        if network and not may_change:
            raise HostError(
                f"The network in {region} was created by another controller, and lets in only "
                f"{', '.join(sorted(known))}.",
                hint=f"Let that controller add {', '.join(sorted(account.controllers))} to its controller_cidrs, or "
                "share its Terraform state in S3: `state` in the configuration.",
            )
        controllers = self._controllers(region, network)
        zones = zone_parts(zones_of(account.api, region), network.parts if network else {})
        self.networks.forget(region)  # it is about to change
        values = {
            "region": region,
            "availability_zones": zones,
            "controllers": numbered(controllers, network.numbers if network else {}),
            "seen": {
                cidr: timestamp(now() if cidr in account.controllers or network is None else network.seen[cidr])
                for cidr in controllers
                if network is None or cidr in account.controllers or cidr in network.seen
            },
            "tags": {
                NETWORK_TAG: region,
                # A controller that adds its address does not take the network over.
                HOME_TAG: network.home if network else account.home.identity,
                OWNER_TAG: network.owner if network else account.owner,
            },
        }
        return SharedNetwork(
            stack=stack,
            values=values,
            root_files=root_files,
            new=network is None,
            remove=lambda: remove_network(account.api, region, account.home.identity),
        )

    def _controllers(self, region: str, network: Network | None) -> frozenset[str]:
        """Returns whom the network lets in from now on: this controller, and the others as long as there is room.

        A controller that was not seen for a day is no longer let in, unless an environment lets it in.

        Raises:
            HostError: its ACL holds no more, and environments run there.
        """
        own = self.account.controllers
        if network is None:
            return own
        recent = {cidr for cidr in network.controllers if now() - network.seen.get(cidr, NEVER) < FORGOTTEN}
        known = network.controllers & (recent | let_in(self.account.api, region, network))
        if rules_fit(self.account.api, region, len(known | own) + NEIGHBOURS + DENIES):
            return known | own
        if users := users_of(self.account.api, region, network):
            raise HostError(
                f"The network in {region} already lets in the addresses of {len(known)} controllers, and its network "
                "ACL has no room for another.",
                hint=f"Destroy the environments there, and the next `up` removes the other addresses: "
                f"{', '.join(users[:5])}.",
            )
        return own  # a controller that comes back is let in again

    def check_allowlist(self, allowed: Collection[Destination]) -> str:
        """Says how much of the account's quota of rules an allowlist takes.

        Raises:
            UsageError: a network ACL does not hold it.
        """
        if not allowed:
            return ""
        api, region = self.account.api, self.account.region
        controllers = len(self.account.controllers)
        rules = controllers + len(allowed) + DENIES
        if not rules_fit(api, region, rules):
            raise UsageError(
                f"An allowlist of {len(allowed)} addresses does not fit a network ACL in {region}: with {controllers} "
                f"for controllers it needs {rules} rules, and the account's quota is {rules_quota(api, region)}.",
                hint="A name counts once for each of its addresses. Allow fewer, or ask AWS for a larger quota "
                "(Service Quotas, Amazon VPC: Rules per network ACL).",
            )
        quota = self.account.answers.get(("rules", region), lambda: rules_quota(api, region))
        room = max(0, quota - controllers - DENIES)
        return f"{len(allowed)} of the {room} addresses that a network ACL in {region} has room for"


def _is_kept(directory: Path, root_files: Mapping[str, str]) -> bool:
    """Whether a stack that this controller has changed before keeps its state where the files of its root say."""
    backend = directory / BACKEND
    return directory.exists() and (backend.read_text() if backend.exists() else None) == root_files.get(BACKEND)


def terraform_variables(api: Api, ours: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables for one Terraform command. They reach it by its environment alone: no file, no state.

    Terraform's provider does not know every kind of profile that boto3 does, such as those of `aws login`, and could
    take another account's credentials. What boto3 returns lasts for ten minutes or more where it can be renewed.

    Args:
        ours: the controller's environment variables.

    Raises:
        HostError: there are no credentials, or they have ended and the operator has to log in.
        InfrastructureError: they could not be renewed now.
    """
    kept = {name: value for name, value in ours.items() if name.startswith("AWS_") and not name.startswith(OWN_SEARCH)}
    found = api.credentials()
    kept["AWS_ACCESS_KEY_ID"] = found.access_key
    kept["AWS_SECRET_ACCESS_KEY"] = found.secret_key
    if found.token:
        kept["AWS_SESSION_TOKEN"] = found.token
    return kept


def await_turn(path: Path, machines: int, tell: Callable[[str], None], check: Callable[[], None]) -> None:
    """Waits until EC2 takes the first requests of an apply, and counts all of them.

    An apply asks for as many machines at once as the bucket holds, and for another when one of them runs, which takes
    ten seconds or more: it comes no faster than the bucket fills.

    Args:
        path: where the processes of a home note what they launch in a region.
        machines: how many the apply launches.
        tell: receives a line if it takes long.
        check: called regularly while it waits; an exception that it raises ends the wait.
    """
    with locked(path.with_suffix(".lock")):
        begin = time.monotonic()
        start, tokens = turn(*_noted(path, begin), begin, machines)
        write_atomically(path, json.dumps([tokens, start]))
    if start - begin > TOLD_SECONDS:
        tell(f"Waiting {start - begin:.0f} s: EC2 takes two launches a second, and other environments come first")
    while (left := start - time.monotonic()) > 0:
        check()
        time.sleep(min(left, CHECK_SECONDS))


def turn(tokens: float, noted_at: float, now: float, machines: int) -> tuple[float, float]:
    """Decides when an apply may begin. Pure.

    Args:
        tokens: how many there were at `noted_at`, which may lie ahead; negative if launches will use what is to come.
        noted_at: in seconds, as `now`.
        machines: how many the apply launches.

    Returns:
        when it begins, and the tokens that are left then.
    """
    present = min(float(BUCKET), tokens + (now - noted_at) * PER_SECOND)
    wait_seconds = max(0.0, (min(machines, BUCKET) - present) / PER_SECOND)
    return now + wait_seconds, present + wait_seconds * PER_SECOND - machines


def _noted(path: Path, now: float) -> tuple[float, float]:
    """Returns the tokens and when they were counted; a full bucket if nothing is noted, or nothing that can be true."""
    try:
        tokens, at = (float(value) for value in json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return float(BUCKET), now
    return (tokens, at) if abs(tokens) < AHEAD_SECONDS and at < now + AHEAD_SECONDS else (float(BUCKET), now)
