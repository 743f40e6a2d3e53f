"""Lists and removes what exists of environments in EC2, by tag, whatever Terraform believes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from botocore.exceptions import ClientError

from provisioner.clouds.aws import schedules
from provisioner.clouds.aws.api import Api, asking, code_of, tag, tagged, tags_of
from provisioner.clouds.aws.network import HOME_TAG, OWNER_TAG
from provisioner.clouds.findings import EnvironmentResources
from provisioner.errors import ProvisionerError

ENVIRONMENT_TAG = "provisioner:environment"
CREATED_TAG = "provisioner:created-at"
# Only on instances and volumes, where it can be changed later.
EXPIRY_TAG = "provisioner:expires-at"
LEASE_TAG = "provisioner:lease-until"
GONE_SECONDS = 300
POLL_SECONDS = 2.0
# EC2 returns at most 1,000 rows at once.
PAGE = 500
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
    """

    name: str
    describe: str
    delete: str
    answer_key: str
    id_key: str
    paged: bool = True


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
    Kind("route table", "describe_route_tables", "delete_route_table", "RouteTables", "RouteTableId"),
)  # fmt: skip
# Spot requests in these states could still start an instance.
_LIVE_SPOT_REQUESTS = ("open", "active")

Filters = list[dict[str, Any]]


def timestamp(moment: datetime) -> str:
    """Formats a time as our tags hold it."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


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


def remaining(api: Api, region: str, environment_id: str) -> list[str]:
    """Describes what still exists of an environment; empty if nothing does."""
    known = instances(api, region, environment_id)
    rows = _rows(api, region, tagged(ENVIRONMENT_TAG, environment_id))
    return [
        *(_described(instance) for instance in known if _state(instance) != "terminated"),
        *(f"spot request {request}" for request in _spot_requests(api, region, known)),
        *(f"{kind.name} {row[kind.id_key]}" for kind, row in rows),
        *(f"schedule {name}" for name in schedules.names(api, region, environment_id)),
    ]


def remove(api: Api, region: str, environment_id: str) -> None:
    """Terminates an environment's instances, waits for their end, then deletes the rest. Safe to repeat.

    What cannot be deleted within five minutes stays, and `remaining` still lists it.

    Raises:
        HostError, InfrastructureError: AWS refuses; or a spot request could not be cancelled, and all else is gone.
    """
    ec2 = api.client("ec2", region)
    deadline = time.monotonic() + GONE_SECONDS
    known = instances(api, region, environment_id)
    alive = [instance["InstanceId"] for instance in known if _state(instance) not in ("terminated", "shutting-down")]
    with asking(f"Terminating the machines of {environment_id}"):
        for first in range(0, len(alive), TERMINATED_AT_ONCE):
            ec2.terminate_instances(InstanceIds=alive[first : first + TERMINATED_AT_ONCE])
    uncancelled = _cancel_spot_requests(api, region, environment_id, known)
    while time.monotonic() < deadline:
        states = {_state(instance) for instance in instances(api, region, environment_id)}
        if states <= {"terminated"}:
            break
        time.sleep(POLL_SECONDS)
    while True:
        rows = list(_rows(api, region, tagged(ENVIRONMENT_TAG, environment_id)))
        for kind, row in rows:
            _delete(ec2, kind, str(row[kind.id_key]))
        if not rows or time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
    # Last: until now it would have ended the machines, had we been killed.
    schedules.remove(api, region, environment_id)
    if uncancelled and _spot_requests(api, region, known):
        raise uncancelled


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
    for name in schedules.names(api, region):
        add(schedules.environment_of(name), f"schedule {name}")
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
    api: Api, region: str, environment_id: str, known: list[dict[str, Any]]
) -> ProvisionerError | None:
    """Cancels the spot requests that could still start another instance.

    Only those: a one-time request closes with its instance (EC2 user guide, "Spot Instance request status").

    Returns:
        what went wrong, which must not keep the rest alive.
    """
    try:
        if requests := _spot_requests(api, region, known):
            with asking(f"Cancelling the spot requests of {environment_id}"):
                api.client("ec2", region).cancel_spot_instance_requests(SpotInstanceRequestIds=requests)
    except ProvisionerError as error:
        return error
    return None


def _rows(api: Api, region: str, filters: Filters) -> Iterator[tuple[Kind, dict[str, Any]]]:
    """All resources but instances, as the API describes them, in the order in which they can be deleted."""
    ec2 = api.client("ec2", region)
    for kind in KINDS:
        with asking(f"Looking for {kind.name}s"):
            if kind.paged:
                pages = ec2.get_paginator(kind.describe).paginate(Filters=filters, PaginationConfig={"PageSize": PAGE})
                rows = [row for page in pages for row in page[kind.answer_key]]
            else:
                rows = getattr(ec2, kind.describe)(Filters=filters)[kind.answer_key]
        for row in rows:
            yield kind, row


def _delete(ec2: Any, kind: Kind, resource_id: str) -> None:
    with asking(f"Deleting the {kind.name}"):
        try:
            getattr(ec2, kind.delete)(**{kind.id_key: resource_id})
        except ClientError as error:
            # Others have to be deleted first, or it is gone already: the next round shows which.
            if code_of(error) in ("DependencyViolation", "VolumeInUse") or "NotFound" in code_of(error):
                return
            raise
