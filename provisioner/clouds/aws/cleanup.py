"""Finds and removes whatever carries an environment's tag, in any region, whatever Terraform believes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from provisioner.base.errors import ProvisionerError, StillThereError, ThrottledError
from provisioner.base.models import Environment
from provisioner.clouds.aws import schedules
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
    moment_of,
    tag,
    tagged,
    tags_of,
)
from provisioner.clouds.aws.instance_watch import FILTER_VALUES, GONE, watch
from provisioner.clouds.cloud import EnvironmentResources

GONE_SECONDS = 300
# Instances with accelerators, and bare metal, took up to 19 minutes (packer-plugin-amazon, issue 682).
SLOW_GONE_SECONDS = 1800
_SLOW_TYPE = re.compile(r"(p|g|gr|inf|trn|dl|vt|f)\d|.*\.metal")
POLL_SECONDS = 2.0
# "This does not mean that the instance has been or will be terminated" (see above).
UNKNOWN_INSTANCE = "InvalidInstanceID.NotFound"
LONGEST_PAUSE_SECONDS = 16.0
# For so long, a refusal to delete something may mean that it is gone: our rights depend on a tag, and it has none then.
REFUSED_SECONDS = 30.0
# For what follows when all the rest has taken its time.
LAST_SECONDS = 60
# EC2 returns at most 100 route tables at once, and refuses to be asked for more (EC2 API reference, "MaxResults").
PAGE = 100
# EC2 bills neither (EC2 user guide, "Amazon EC2 instance state changes").
UNBILLED = (GONE, "shutting-down")
# EC2 user guide, "Terminate": in batches, since one wrong id fails the whole request.
TERMINATED_AT_ONCE = 100


# Kind of resource -> the key of its id. All but instances, in the order in which they can be deleted.
KINDS = {
    "network interface": "NetworkInterfaceId",
    "volume": "VolumeId",
    "security group": "GroupId",
    "key pair": "KeyName",
    "subnet": "SubnetId",
    "network ACL": "NetworkAclId",
    "route table": "RouteTableId",
}
# Spot requests in these states could still start an instance.
_LIVE_SPOT_REQUESTS = ("open", "active")

# Filters for what carries the tag of any environment, of whatever home.
OF_ANY = [{"Name": "tag-key", "Values": [ENVIRONMENT_TAG]}]

Row = dict[str, Any]
Answer = TypeVar("Answer")


def instances(api: Api, region: str, environment_id: str) -> list[Row]:
    """Lists the environment's instances as DescribeInstances does: terminated ones stay for about an hour."""
    return _instances(api, region, tagged(ENVIRONMENT_TAG, environment_id))


def _instances(api: Api, region: str, filters: list[Row]) -> list[Row]:
    with asking(f"Looking for machines in {region}"):
        pages = api.client("ec2", region).get_paginator("describe_instances")
        return [
            instance
            for page in pages.paginate(Filters=filters, PaginationConfig={"PageSize": PAGE})
            for reservation in page["Reservations"]
            for instance in reservation["Instances"]
        ]


def _state(instance: Row) -> str:
    return str(instance["State"]["Name"])


def _all_instances(api: Api, region: str, environment_id: str, recorded: Collection[str]) -> list[Row]:
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
    return [
        *(_described(instance) for instance in known if _state(instance) != "terminated"),
        *(f"spot request {request}" for request in _spot_requests(api, region, known)),
        *(f"{kind} {identity}" for kind, identity, _ in _rows(api, region, tagged(ENVIRONMENT_TAG, environment_id))),
        *(f"schedule {name}" for name in schedules.names(api, region, environment_id)),
    ]


def remove(
    api: Api, region: str, environment_id: str, recorded: Collection[str] = (), *, just_created: bool = False
) -> None:
    """Terminates an environment's instances, waits for their end, then deletes the rest. Safe to repeat.

    What cannot be deleted within five minutes stays, and `remaining` still lists it; half an hour if an instance has an
    accelerator or is bare metal. A throttled answer is asked for
    again until then: many environments may end at once.

    Args:
        recorded: ids of instances that the environment's record names.
        just_created: whether something of it may have been created seconds ago, so that one look which finds nothing
            proves nothing.

    Raises:
        HostError, InfrastructureError: AWS refuses; or a spot request could not be cancelled, and all else is gone.
    """
    begun = time.monotonic()
    deadline = begun + GONE_SECONDS
    look_until = time.monotonic() + (SHOWN_SECONDS if just_created else 0)
    trust_from = time.monotonic() + REFUSED_SECONDS
    ended: dict[str, Row] = {}
    uncancelled: ProvisionerError | None = None
    look = True
    while True:
        if look:
            known = _insisting(lambda: _all_instances(api, region, environment_id, recorded), deadline)
            new = [instance for instance in known if instance["InstanceId"] not in ended]
            if any(_SLOW_TYPE.match(instance["InstanceType"]) for instance in new):
                deadline = begun + SLOW_GONE_SECONDS
            uncancelled = _end(api, region, environment_id, new, deadline) or uncancelled
            ended |= {instance["InstanceId"]: instance for instance in new}
        rows = _insisting(lambda: list(_rows(api, region, tagged(ENVIRONMENT_TAG, environment_id))), deadline)
        deleted = [
            _insisting(partial(_delete, api.client("ec2", region), trust_from, kind, identity), deadline)
            for kind, identity, _ in rows
        ]
        if (not rows and time.monotonic() >= look_until) or time.monotonic() > deadline:
            break
        look = just_created or not all(deleted)  # for a machine that was not shown before, and uses what is refused
        time.sleep(POLL_SECONDS)
    # Last: until now it would have ended the machines, had we been killed.
    deadline += LAST_SECONDS
    _insisting(lambda: schedules.remove(api, region, environment_id), deadline)
    if uncancelled and _insisting(lambda: _spot_requests(api, region, list(ended.values())), deadline):
        raise uncancelled


def terminate(api: Api, region: str, environment_ids: Collection[str]) -> set[str]:
    """Terminates environments' instances, and does not wait for their end.

    Returns:
        the ids of the instances that EC2 has confirmed to be shutting down or terminated.

    Raises:
        HostError, InfrastructureError: AWS refuses, or throttles for a minute.
    """
    deadline = time.monotonic() + LAST_SECONDS
    names, ended = sorted(environment_ids), set[str]()
    for first in range(0, len(names), FILTER_VALUES):
        some = names[first : first + FILTER_VALUES]
        known = _insisting(partial(_instances, api, region, tagged(ENVIRONMENT_TAG, *some)), deadline)
        _terminate_all(api, region, ", ".join(some), known, deadline)
        ended.update(instance["InstanceId"] for instance in known)
    return ended


def _terminate_all(api: Api, region: str, whose: str, known: list[Row], deadline: float) -> None:
    """Terminates instances without an orderly shutdown: no image is made of a disk whose builder still runs.

    EC2 answers once all of them are shutting down (EC2 API reference, "TerminateInstances").
    """

    def terminate_some(instance_ids: list[str]) -> None:
        with asking(f"Terminating the machines of {whose}"):
            try:
                api.client("ec2", region).terminate_instances(InstanceIds=instance_ids, SkipOsShutdown=True)
            except ClientError as error:
                if code_of(error) == UNKNOWN_INSTANCE:  # although it has just described them to us
                    raise ThrottledError(f"EC2 does not know the machines of {whose} everywhere yet") from error
                raise

    alive = [instance["InstanceId"] for instance in known if _state(instance) not in UNBILLED]
    for first in range(0, len(alive), TERMINATED_AT_ONCE):
        _insisting(partial(terminate_some, alive[first : first + TERMINATED_AT_ONCE]), deadline)


def _end(api: Api, region: str, environment_id: str, known: list[Row], deadline: float) -> ProvisionerError | None:
    """Terminates instances, cancels their spot requests, and waits for their end.

    Returns:
        why a spot request could not be cancelled, which must not keep the rest alive.
    """

    def cancel() -> None:
        # Only what could still start an instance: a one-time request closes with its own (EC2 user guide, "Spot
        # Instance request status").
        if requests := _spot_requests(api, region, known):
            with asking(f"Cancelling the spot requests of {environment_id}"):
                api.client("ec2", region).cancel_spot_instance_requests(SpotInstanceRequestIds=requests)

    _terminate_all(api, region, environment_id, known, deadline)
    uncancelled = None
    try:
        _insisting(cancel, deadline)
    except ProvisionerError as error:
        uncancelled = error
    instance_ids = [instance["InstanceId"] for instance in known if _state(instance) != GONE]
    watched = watch(api, region)  # one look serves all threads that wait in a region
    while instance_ids and time.monotonic() < deadline:
        instance_ids = [name for name in instance_ids if watched.state(api, name) != GONE]
        if instance_ids:
            time.sleep(POLL_SECONDS)
    return uncancelled


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
    surveyed: dict[str, EnvironmentResources] = {}

    def add(name: str, resource: str, row: Row | None = None, created_at: datetime | None = None) -> None:
        before = surveyed.get(name, EnvironmentResources(environment=name, region=region))
        row = row or {}
        surveyed[name] = replace(
            before,
            resources=(*before.resources, resource),
            home=before.home or tag(row, HOME_TAG),
            owner=before.owner or tag(row, OWNER_TAG),
            # The oldest creation, the latest expiry and lease: in doubt, the environment is in use.
            created_at=_pick(min, before.created_at, moment_of(tag(row, CREATED_TAG)), created_at),
            expires_at=_pick(max, before.expires_at, moment_of(tag(row, EXPIRY_TAG))),
            leased_until=_pick(max, before.leased_until, moment_of(tag(row, LEASE_TAG))),
        )

    for instance in _instances(api, region, OF_ANY):
        if _state(instance) != "terminated":
            add(tag(instance, ENVIRONMENT_TAG), _described(instance), instance, instance.get("LaunchTime"))
    for kind, identity, row in _rows(api, region, OF_ANY):
        add(tag(row, ENVIRONMENT_TAG), f"{kind} {identity}", row, row.get("CreateTime"))
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


def _described(instance: Row) -> str:
    return f"instance {instance['InstanceId']} ({_state(instance)})"


def _pick(choose: Any, *moments: datetime | None) -> datetime | None:
    known = [moment for moment in moments if moment]
    return choose(known) if known else None


def _spot_requests(api: Api, region: str, known: list[Row]) -> list[str]:
    """The ids of the instances' spot requests that could still start another instance."""
    ids = [instance["SpotInstanceRequestId"] for instance in known if instance.get("SpotInstanceRequestId")]
    if not ids:
        return []
    with asking("Looking for spot requests"):
        # By a filter, not by ids: an id that no longer exists would fail the whole request.
        filters = [{"Name": "spot-instance-request-id", "Values": ids}]
        rows = api.client("ec2", region).describe_spot_instance_requests(Filters=filters)["SpotInstanceRequests"]
    return [row["SpotInstanceRequestId"] for row in rows if row["State"] in _LIVE_SPOT_REQUESTS]


def _rows(api: Api, region: str, filters: list[Row]) -> Iterator[tuple[str, str, Row]]:
    """Yields the kind and id of each resource but instances, and EC2's description, in the order of `KINDS`."""
    ec2 = api.client("ec2", region)
    for kind, id_key in KINDS.items():
        describe, answer_key = f"describe_{_in_calls(kind)}s", f"{kind.title().replace(' ', '')}s"
        with asking(f"Looking for {kind}s"):
            if ec2.can_paginate(describe):
                config = {"PageSize": PAGE}
                pages = ec2.get_paginator(describe).paginate(Filters=filters, PaginationConfig=config)
                rows = [row for page in pages for row in page[answer_key]]
            else:
                rows = getattr(ec2, describe)(Filters=filters)[answer_key]
        yield from ((kind, row[id_key], row) for row in rows)


def _in_calls(kind: str) -> str:
    return kind.lower().replace(" ", "_")


def _delete(ec2: Any, trust_from: float, kind: str, identity: str) -> bool:
    """Deletes a resource; False if something that depends on it has to go first, or if it may be gone.

    Args:
        trust_from: when a refusal counts as one.
    """
    with asking(f"Deleting the {kind}"):
        try:
            getattr(ec2, f"delete_{_in_calls(kind)}")(**{KINDS[kind]: identity})
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

    def end_machines(self, environments: Collection[Environment]) -> set[str]:
        """Terminates instances: Terraform deletes a schedule before the machine that it would end."""
        by_region: dict[str, list[str]] = {}
        ended: set[str] = set()
        for environment in environments:
            if region := self._region(environment):
                by_region.setdefault(region, []).append(environment.id)
        for region, ids in by_region.items():
            ended |= terminate(self.account.api, region, ids)
        return ended

    def remaining(self, environment: Environment) -> list[str]:
        """Lists what EC2 still has with the environment's tag, or as a machine of its record."""
        region = self._region(environment)
        return remaining(self.account.api, region, environment.id, environment.instance_ids) if region else []

    def remove(self, environment: Environment) -> None:
        """Removes everything that carries the environment's tag, and the machines of its record."""
        if region := self._region(environment):
            remove(self.account.api, region, environment.id, environment.instance_ids)

    def _region(self, environment: Environment) -> str:
        """The region in which this account may have something of an environment; empty if it was never placed."""
        region = environment.placement.get("region", "")
        if region:
            self.account.require_own(environment.id, environment.placement.get("account", ""))
        return region
