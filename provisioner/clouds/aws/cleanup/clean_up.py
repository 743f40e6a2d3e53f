"""Finds and removes whatever carries an environment's tag, in any region."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from provisioner.clouds.aws.account import Account
from provisioner.clouds.aws.api import (
    CLOSED_REGION,
    CREATED_TAG,
    ENVIRONMENT_TAG,
    EXPIRY_TAG,
    HOME_TAG,
    LEASE_TAG,
    OWNER_TAG,
    REFUSED,
    SHOWN_SECONDS,
    Api,
    asking,
    code_of,
    tag,
    tagged,
    tags_of,
)
from provisioner.clouds.aws.cleanup import schedules
from provisioner.clouds.aws.instance_watch import FILTER_VALUES, GONE, watch
from provisioner.clouds.cloud import EnvironmentResources
from provisioner.errors import ProvisionerError, StillThereError, ThrottledError
from provisioner.models import Environment

GONE_SECONDS = 300
POLL_SECONDS = 2.0
# "This does not mean that the instance has been or will be terminated" (see above).
UNKNOWN_INSTANCE = "InvalidInstanceID.NotFound"
LONGEST_PAUSE_SECONDS = 16.0
# For so long, a refusal to delete something may mean that it is gone: our rights depend on a tag, and it has none then.
REFUSED_SECONDS = 30.0
# For what follows when all the rest has taken its time.
LAST_SECONDS = 60
# EC2 returns at most 1,000 rows at once, and refuses to be asked for more (EC2 API reference, "MaxResults").
PAGE = 500
# Of route tables, 100 (EC2 API reference, "DescribeRouteTables").
PAGE_OF_ROUTE_TABLES = 100
# EC2 user guide, "Terminate": in batches, since one wrong id fails the whole request.
TERMINATED_AT_ONCE = 100


@dataclass(frozen=True)
class Kind:
    """One kind of resource, and how EC2's API lists and deletes it.

    Args:
        name: in messages.
        describe, delete: the API's calls.
        answer_key: under which an answer lists the resources.
        id_key: under which a resource has its id.
        paged: whether the answer comes in pages.
        page: how many rows a page may have.
    """

    name: str
    describe: str
    delete: str
    answer_key: str
    id_key: str
    paged: bool = True
    page: int = PAGE


# All but instances, in the order in which they can be deleted.
KINDS = (
    Kind(
        "network interface", "describe_network_interfaces", "delete_network_interface",
        "NetworkInterfaces", "NetworkInterfaceId",
    ),
    Kind("volume", "describe_volumes", "delete_volume", "Volumes", "VolumeId"),
    Kind("security group", "describe_security_groups", "delete_security_group", "SecurityGroups", "GroupId"),
    Kind("key pair", "describe_key_pairs", "delete_key_pair", "KeyPairs", "KeyName", paged=False),
    Kind("subnet", "describe_subnets", "delete_subnet", "Subnets", "SubnetId"),
    Kind("network ACL", "describe_network_acls", "delete_network_acl", "NetworkAcls", "NetworkAclId"),
    Kind(
        "route table", "describe_route_tables", "delete_route_table", "RouteTables", "RouteTableId",
        page=PAGE_OF_ROUTE_TABLES,
    ),
)  # fmt: skip
# Spot requests in these states could still start an instance.
_LIVE_SPOT_REQUESTS = ("open", "active")

Filters = list[dict[str, Any]]
Answer = TypeVar("Answer")


def instances(api: Api, region: str, environment_id: str) -> list[dict[str, Any]]:
    """Lists the environment's instances as DescribeInstances does: terminated ones stay for about an hour."""
    with asking(f"Looking for the machines of {environment_id}"):
        return _instances(api, region, tagged(ENVIRONMENT_TAG, environment_id))


def _instances(api: Api, region: str, filters: Filters) -> list[dict[str, Any]]:
    pages = api.client("ec2", region).get_paginator("describe_instances")
    return [
        instance
        for page in pages.paginate(Filters=filters, PaginationConfig={"PageSize": PAGE})
        for reservation in page["Reservations"]
        for instance in reservation["Instances"]
    ]


def _state(instance: dict[str, Any]) -> str:
    return str(instance["State"]["Name"])


def _all_instances(api: Api, region: str, environment_id: str, recorded: Collection[str]) -> list[dict[str, Any]]:
    """Lists the environment's instances by tag, and those of a record that are not shown by tag.

    Raises:
        ThrottledError: AWS does not say.
    """
    known = instances(api, region, environment_id)
    unseen = sorted(set(recorded) - {instance["InstanceId"] for instance in known})
    if not unseen:
        return known
    watched = watch(api, region)
    watched.rows(api, unseen)  # one look for them all
    existing = [name for name in unseen if watched.state(api, name) != GONE]
    rows = watched.rows(api, existing)
    if len(rows) < len(existing):
        raise ThrottledError(f"Looking for the machines of {environment_id} failed: AWS throttles requests")
    return [*known, *rows]


def remaining(api: Api, region: str, environment_id: str, recorded: Collection[str] = ()) -> list[str]:
    """Describes what still exists of an environment; empty if nothing does. Asks again while AWS throttles.

    Args:
        recorded: ids of instances that the environment's record names.

    Raises:
        HostError, InfrastructureError: AWS does not say, or throttles for five minutes.
    """
    return _insisting(lambda: _remaining(api, region, environment_id, recorded), time.monotonic() + GONE_SECONDS)


def _remaining(api: Api, region: str, environment_id: str, recorded: Collection[str]) -> list[str]:
    known = _all_instances(api, region, environment_id, recorded)
    rows = _rows(api, region, tagged(ENVIRONMENT_TAG, environment_id))
    return [
        *(_described(instance) for instance in known if _state(instance) != "terminated"),
        *(f"spot request {request}" for request in _spot_requests(api, region, known)),
        *(f"{kind.name} {row[kind.id_key]}" for kind, row in rows),
        *(f"schedule {name}" for name in schedules.names(api, region, environment_id)),
    ]


def remove(
    api: Api, region: str, environment_id: str, recorded: Collection[str] = (), *, just_created: bool = False
) -> None:
    """Terminates an environment's instances, waits for their end, then deletes the rest. Safe to repeat.

    What cannot be deleted within five minutes stays, and `remaining` still lists it. A throttled answer is asked for
    again until then: many environments may end at once.

    Args:
        recorded: ids of instances that the environment's record names.
        just_created: whether something of it may have been created seconds ago, so that one look which finds nothing
            proves nothing.

    Raises:
        HostError, InfrastructureError: AWS refuses; or a spot request could not be cancelled, and all else is gone.
    """
    deadline = time.monotonic() + GONE_SECONDS
    look_until = time.monotonic() + (SHOWN_SECONDS if just_created else 0)
    trust_from = time.monotonic() + REFUSED_SECONDS
    ended: dict[str, dict[str, Any]] = {}
    uncancelled: ProvisionerError | None = None
    look = True
    while True:
        if look:
            known = _insisting(lambda: _all_instances(api, region, environment_id, recorded), deadline)
            new = [instance for instance in known if instance["InstanceId"] not in ended]
            uncancelled = _end(api, region, environment_id, new, deadline) or uncancelled
            ended |= {instance["InstanceId"]: instance for instance in new}
        rows = _insisting(lambda: list(_rows(api, region, tagged(ENVIRONMENT_TAG, environment_id))), deadline)
        deleted = [_insisting(partial(_delete, api.client("ec2", region), trust_from, *row), deadline) for row in rows]
        if (not rows and time.monotonic() >= look_until) or time.monotonic() > deadline:
            break
        look = just_created or not all(deleted)  # for a machine that was not shown before, and uses what is refused
        time.sleep(POLL_SECONDS)
    # Last: until now it would have ended the machines, had we been killed.
    deadline += LAST_SECONDS
    _insisting(lambda: schedules.remove(api, region, environment_id), deadline)
    if uncancelled and _insisting(lambda: _spot_requests(api, region, list(ended.values())), deadline):
        raise uncancelled


def terminate(api: Api, region: str, environment_ids: Collection[str]) -> None:
    """Terminates environments' instances, and does not wait for their end.

    Raises:
        HostError, InfrastructureError: AWS refuses, or throttles for a minute.
    """
    deadline = time.monotonic() + LAST_SECONDS
    names = sorted(environment_ids)
    for first in range(0, len(names), FILTER_VALUES):
        some = names[first : first + FILTER_VALUES]
        known = _insisting(partial(_instances, api, region, tagged(ENVIRONMENT_TAG, *some)), deadline)
        _terminate_all(api, region, ", ".join(some), known, deadline)


def _terminate_all(api: Api, region: str, whose: str, known: list[dict[str, Any]], deadline: float) -> None:
    ec2 = api.client("ec2", region)
    alive = [instance["InstanceId"] for instance in known if _state(instance) not in (GONE, "shutting-down")]
    for first in range(0, len(alive), TERMINATED_AT_ONCE):
        _insisting(partial(_terminate, ec2, whose, alive[first : first + TERMINATED_AT_ONCE]), deadline)


def _end(
    api: Api, region: str, environment_id: str, known: list[dict[str, Any]], deadline: float
) -> ProvisionerError | None:
    """Terminates instances, cancels their spot requests, and waits for their end.

    Returns:
        why a spot request could not be cancelled, which must not keep the rest alive.
    """
    _terminate_all(api, region, environment_id, known, deadline)
    uncancelled = _cancel_spot_requests(api, region, environment_id, known, deadline)
    _await_end(api, region, [instance["InstanceId"] for instance in known if _state(instance) != GONE], deadline)
    return uncancelled


def _terminate(ec2: Any, environment_id: str, instance_ids: list[str]) -> None:
    with asking(f"Terminating the machines of {environment_id}"):
        try:
            ec2.terminate_instances(InstanceIds=instance_ids)
        except ClientError as error:
            if code_of(error) == UNKNOWN_INSTANCE:  # although it has just described them to us
                raise ThrottledError(f"EC2 does not know the machines of {environment_id} everywhere yet") from error
            raise


def _await_end(api: Api, region: str, instance_ids: list[str], deadline: float) -> None:
    """Waits until EC2 says that instances have ended. One look serves all threads that wait in a region."""
    watched = watch(api, region)
    while instance_ids and time.monotonic() < deadline:
        instance_ids = [name for name in instance_ids if watched.state(api, name) != GONE]
        if instance_ids:
            time.sleep(POLL_SECONDS)


def _insisting(ask: Callable[[], Answer], deadline: float) -> Answer:
    """Asks again, with growing pauses, while AWS throttles.

    Raises:
        ThrottledError: it still does at the deadline.
    """
    pause = POLL_SECONDS
    while True:
        try:
            return ask()
        except ThrottledError:
            if time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def survey(api: Api, region: str) -> list[EnvironmentResources]:
    """Lists everything in a region that carries our environments' tag or is scheduled for one, by environment."""
    filters = [{"Name": "tag-key", "Values": [ENVIRONMENT_TAG]}]
    with asking(f"Looking for what carries our tags in {region}"):
        known = [instance for instance in _instances(api, region, filters) if _state(instance) != "terminated"]
    surveyed: dict[str, EnvironmentResources] = {}

    def add(name: str, resource: str, row: dict[str, Any] | None = None, created_at: datetime | None = None) -> None:
        before = surveyed.get(name, EnvironmentResources(environment=name, region=region))
        row = row or {}
        surveyed[name] = replace(
            before,
            resources=(*before.resources, resource),
            home=before.home or tag(row, HOME_TAG),
            owner=before.owner or tag(row, OWNER_TAG),
            # The oldest creation, the latest expiry and lease: in doubt, the environment is in use.
            created_at=_pick(min, before.created_at, _parsed(tag(row, CREATED_TAG)), created_at),
            expires_at=_pick(max, before.expires_at, _parsed(tag(row, EXPIRY_TAG))),
            leased_until=_pick(max, before.leased_until, _parsed(tag(row, LEASE_TAG))),
        )

    for instance in known:
        add(tag(instance, ENVIRONMENT_TAG), _described(instance), instance, instance.get("LaunchTime"))
    for kind, row in _rows(api, region, filters):
        add(tag(row, ENVIRONMENT_TAG), f"{kind.name} {row[kind.id_key]}", row, row.get("CreateTime"))
    # A schedule bears no tags. One that has outlived all else is told by its age.
    for name, created_at in schedules.with_creation(api, region):
        add(schedules.environment_of(name), f"schedule {name}", created_at=created_at)
    return list(surveyed.values())


def retag(api: Api, region: str, environment_id: str, tags: dict[str, str]) -> None:
    """Puts tags on the environment's instances and volumes."""
    known = instances(api, region, environment_id)
    ids = [instance["InstanceId"] for instance in known if _state(instance) != "terminated"]
    with asking(f"Looking for volumes of {environment_id}"):
        volumes = api.client("ec2", region).describe_volumes(Filters=tagged(ENVIRONMENT_TAG, environment_id))["Volumes"]
    if ids := ids + [volume["VolumeId"] for volume in volumes]:
        with asking(f"Tagging {environment_id}"):
            api.client("ec2", region).create_tags(Resources=ids, Tags=tags_of(tags))


def _described(instance: dict[str, Any]) -> str:
    return f"instance {instance['InstanceId']} ({_state(instance)})"


def _parsed(timestamp: str) -> datetime | None:
    try:
        return datetime.fromisoformat(timestamp.replace("Z", "+00:00"))
    except ValueError:
        return None


def _pick(choose: Any, *moments: datetime | None) -> datetime | None:
    known = [moment for moment in moments if moment]
    return choose(known) if known else None


def _spot_requests(api: Api, region: str, known: list[dict[str, Any]]) -> list[str]:
    """The ids of the instances' spot requests that could still start another instance."""
    ids = [instance["SpotInstanceRequestId"] for instance in known if instance.get("SpotInstanceRequestId")]
    if not ids:
        return []
    with asking("Looking for spot requests"):
        # By a filter, not by ids: an id that no longer exists would fail the whole request.
        filters = [{"Name": "spot-instance-request-id", "Values": ids}]
        rows = api.client("ec2", region).describe_spot_instance_requests(Filters=filters)["SpotInstanceRequests"]
    return [row["SpotInstanceRequestId"] for row in rows if row["State"] in _LIVE_SPOT_REQUESTS]


def _cancel_spot_requests(
    api: Api, region: str, environment_id: str, known: list[dict[str, Any]], deadline: float
) -> ProvisionerError | None:
    """Cancels the spot requests that could still start another instance.

    Only those: a one-time request closes with its instance (EC2 user guide, "Spot Instance request status").

    Returns:
        what went wrong, which must not keep the rest alive.
    """

    def cancel() -> None:
        if requests := _spot_requests(api, region, known):
            with asking(f"Cancelling the spot requests of {environment_id}"):
                api.client("ec2", region).cancel_spot_instance_requests(SpotInstanceRequestIds=requests)

    try:
        _insisting(cancel, deadline)
    except ProvisionerError as error:
        return error
    return None


def _rows(api: Api, region: str, filters: Filters) -> Iterator[tuple[Kind, dict[str, Any]]]:
    """All resources but instances, as the API describes them, in the order in which they can be deleted."""
    ec2 = api.client("ec2", region)
    for kind in KINDS:
        with asking(f"Looking for {kind.name}s"):
            if kind.paged:
                config = {"PageSize": kind.page}
                pages = ec2.get_paginator(kind.describe).paginate(Filters=filters, PaginationConfig=config)
                rows = [row for page in pages for row in page[kind.answer_key]]
            else:
                rows = getattr(ec2, kind.describe)(Filters=filters)[kind.answer_key]
        for row in rows:
            yield kind, row


def _delete(ec2: Any, trust_from: float, kind: Kind, row: dict[str, Any]) -> bool:
    """Deletes a resource; False if something that depends on it has to go first, or if it may be gone.

    Args:
        trust_from: when a refusal counts as one.
    """
    with asking(f"Deleting the {kind.name}"):
        try:
            getattr(ec2, kind.delete)(**{kind.id_key: row[kind.id_key]})
        except ClientError as error:
            if code_of(error) in ("DependencyViolation", "VolumeInUse"):
                return False
            if code_of(error) in REFUSED and time.monotonic() < trust_from:
                return False
            if "NotFound" not in code_of(error):  # then it is gone already
                raise
    return True


ROLE_TAG = "provisioner:role"
# Regions surveyed at once.
PARALLEL_SURVEYS = 8


class AwsCleanUp:
    """The tagged resources of one account."""

    account: Account

    def list_resources(self, regions: Sequence[str] | None) -> list[EnvironmentResources]:
        """Lists everything that carries our tags, region by region, or wherever these credentials may look."""
        surveyed = self.open_regions(lambda _: None) if regions is None else regions
        with ThreadPoolExecutor(max_workers=PARALLEL_SURVEYS) as pool:
            answers = pool.map(partial(survey, self.account.api), surveyed)
            return [resources for answer in answers for resources in answer]

    def open_regions(self, tell: Callable[[str], None]) -> list[str]:
        """Lists the account's regions, without those that a policy of its organization has closed.

        Nor those in which these credentials do not count, such as regions that the account has switched on itself: a
        session of the global STS endpoint has no access there (IAM user guide, "Manage AWS STS in an AWS Region").
        """
        with asking("Listing regions"):
            regions = self.account.api.client("ec2").describe_regions()["Regions"]
        names = sorted(str(region["RegionName"]) for region in regions)
        with ThreadPoolExecutor(max_workers=PARALLEL_SURVEYS) as pool:
            is_closed = dict(zip(names, pool.map(self._is_closed, names), strict=True))
        if closed := [name for name in names if is_closed[name]]:
            tell(f"Skipped, because these credentials may not list resources there: {', '.join(closed)}")
        return [name for name in names if not is_closed[name]]

    def _is_closed(self, region: str) -> bool:
        """Whether EC2 refuses even to list instances there. The own region counts as open: its refusal is told."""
        if region == self.account.region:
            return False
        try:
            self.account.api.client("ec2", region).describe_instances(MaxResults=5)
        except ClientError as error:
            return code_of(error) in (*REFUSED, *CLOSED_REGION)
        except BotoCoreError:  # the survey tells
            return False
        return False

    def delete_resources(self, resources: EnvironmentResources) -> bool:
        """Removes everything that carries the environment's tag.

        Returns:
            whether each of its machines had its schedule: they are created last, after all instances.

        Raises:
            StillThereError: a resource could not be removed.
        """
        api, region = self.account.api, resources.region
        name = resources.environment
        scheduled = set(schedules.names(api, region, name))
        roles = {tag(instance, ROLE_TAG) for instance in instances(api, region, name)}
        complete = bool(scheduled) and scheduled >= {schedules.name_of(name, role) for role in roles}
        remove(api, region, name)
        if left := remaining(api, region, name):
            raise StillThereError(f"{name} is not gone: {', '.join(left)}")
        return complete

    def end_machines(self, environments: Collection[Environment]) -> None:
        """Terminates instances: Terraform deletes a schedule before the machine that it would end."""
        by_region: dict[str, list[str]] = {}
        for environment in environments:
            if "region" in environment.placement:
                self.account.require_own(environment.id, environment.placement.get("account", ""))
                by_region.setdefault(environment.placement["region"], []).append(environment.id)
        for region, ids in by_region.items():
            terminate(self.account.api, region, ids)

    def remaining(self, environment: Environment) -> list[str]:
        """Lists what EC2 still has with the environment's tag, or as a machine of its record."""
        if "region" not in environment.placement:
            return []
        self.account.require_own(environment.id, environment.placement.get("account", ""))
        region = environment.placement["region"]
        return remaining(self.account.api, region, environment.id, environment.instance_ids)

    def remove(self, environment: Environment) -> None:
        """Removes everything that carries the environment's tag, and the machines of its record."""
        if "region" in environment.placement:
            self.account.require_own(environment.id, environment.placement.get("account", ""))
            region = environment.placement["region"]
            remove(self.account.api, region, environment.id, environment.instance_ids)
