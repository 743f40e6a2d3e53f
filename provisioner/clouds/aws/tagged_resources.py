"""What exists of environments, asked of EC2 by tag, and its removal, whatever Terraform believes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

from botocore.exceptions import ClientError

from provisioner.clouds import Found
from provisioner.clouds.aws import schedules
from provisioner.clouds.aws.api import Api, asking, code_of, tag, tagged, tags_of
from provisioner.clouds.aws.network import HOME_TAG

ENVIRONMENT_TAG = "provisioner:environment"
CREATED_TAG = "provisioner:created-at"
# Only on instances and volumes: it may be moved.
EXPIRY_TAG = "provisioner:expires-at"
LEASE_TAG = "provisioner:lease-until"
OWNER_TAG = "provisioner:owner"
GONE_SECONDS = 300
POLL_SECONDS = 2.0
# EC2 answers at most 1,000 things at once.
PAGE = 500
# EC2 user guide, "Terminate": in batches, since one wrong id fails all.
TERMINATED_AT_ONCE = 100
# describe call -> (key of its answer, key of the id, what it is called, delete call)
KINDS: dict[str, tuple[str, str, str, str]] = {
    "describe_network_interfaces": (
        "NetworkInterfaces", "NetworkInterfaceId", "network interface", "delete_network_interface",
    ),
    "describe_volumes": ("Volumes", "VolumeId", "volume", "delete_volume"),
    "describe_security_groups": ("SecurityGroups", "GroupId", "security group", "delete_security_group"),
    "describe_key_pairs": ("KeyPairs", "KeyName", "key pair", "delete_key_pair"),
    "describe_subnets": ("Subnets", "SubnetId", "subnet", "delete_subnet"),
    "describe_network_acls": ("NetworkAcls", "NetworkAclId", "network ACL", "delete_network_acl"),
    "describe_route_tables": ("RouteTables", "RouteTableId", "route table", "delete_route_table"),
}  # fmt: skip
_NEVER_PAGED = ("describe_key_pairs",)
_SPOT_REQUEST_LIVES = ("open", "active")

Filters = list[dict[str, Any]]


def when(moment: datetime) -> str:
    """A moment as our tags write it."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def instances(api: Api, region: str, environment_id: str) -> list[dict[str, Any]]:
    """The environment's instances, as DescribeInstances tells them; AWS shows terminated ones for about an hour."""
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


def left(api: Api, region: str, environment_id: str) -> list[str]:
    """What still exists, in words; empty: nothing does."""
    known = instances(api, region, environment_id)
    found = [_words(one) for one in known if one["State"]["Name"] != "terminated"]
    found += [f"spot request {one}" for one in _spot_requests(api, region, known)]
    found += [
        f"{KINDS[call][2]} {row[KINDS[call][1]]}"
        for call, row in _things(api, region, tagged(ENVIRONMENT_TAG, environment_id))
    ]
    return found + [f"schedule {name}" for name in schedules.names(api, region, environment_id)]


def remove(api: Api, region: str, environment_id: str) -> None:
    """Terminates the instances, waits for their end, then deletes the rest. Safe to repeat.

    What will not go within five minutes stays, and `left` still tells it.
    """
    ec2 = api.client("ec2", region)
    deadline = time.monotonic() + GONE_SECONDS
    known = instances(api, region, environment_id)
    if requests := _spot_requests(api, region, known):
        with asking(f"Cancelling the spot requests of {environment_id}"):
            ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=requests)
    alive = [one["InstanceId"] for one in known if one["State"]["Name"] not in ("terminated", "shutting-down")]
    with asking(f"Terminating the machines of {environment_id}"):
        for first in range(0, len(alive), TERMINATED_AT_ONCE):
            ec2.terminate_instances(InstanceIds=alive[first : first + TERMINATED_AT_ONCE])
    while time.monotonic() < deadline:
        states = {one["State"]["Name"] for one in instances(api, region, environment_id)}
        if states <= {"terminated"}:
            break
        time.sleep(POLL_SECONDS)
    while True:
        things = list(_things(api, region, tagged(ENVIRONMENT_TAG, environment_id)))
        for call, row in things:
            _, key, what, delete = KINDS[call]
            _delete(getattr(ec2, delete), what, {key: str(row[key])})
        if not things or time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
    # Last: until here it would have ended the machines, had we been killed.
    schedules.remove(api, region, environment_id)


def survey(api: Api, region: str) -> list[Found]:
    """All that carries our environments' tag in a region, or is scheduled for one, by environment."""
    filters = [{"Name": "tag-key", "Values": [ENVIRONMENT_TAG]}]
    with asking(f"Looking for what carries our tags in {region}"):
        known = [one for one in _instances(api, region, filters) if one["State"]["Name"] != "terminated"]
    found: dict[str, Found] = {}

    def add(name: str, what: str, row: dict[str, Any] | None = None, created_at: datetime | None = None) -> None:
        one = found.setdefault(name, Found(environment=name, things=(), region=region))
        row = row or {}
        found[name] = replace(
            one,
            things=(*one.things, what),
            home=one.home or tag(row, HOME_TAG),
            owner=one.owner or tag(row, OWNER_TAG),
            # The oldest creation, the latest limit and lease: in doubt, it lives.
            created_at=_pick(min, one.created_at, _moment(tag(row, CREATED_TAG)), created_at),
            expires_at=_pick(max, one.expires_at, _moment(tag(row, EXPIRY_TAG))),
            leased_until=_pick(max, one.leased_until, _moment(tag(row, LEASE_TAG))),
        )

    for instance in known:
        add(tag(instance, ENVIRONMENT_TAG), _words(instance), instance, instance.get("LaunchTime"))
    for call, row in _things(api, region, filters):
        _, key, what, _ = KINDS[call]
        add(tag(row, ENVIRONMENT_TAG), f"{what} {row[key]}", row, row.get("CreateTime"))
    for name in schedules.names(api, region):
        add(name, f"schedule {name}")
    return list(found.values())


def retag(api: Api, region: str, environment_id: str, tags: dict[str, str]) -> None:
    """Puts tags on the environment's instances and volumes."""
    ids = [one["InstanceId"] for one in instances(api, region, environment_id) if one["State"]["Name"] != "terminated"]
    with asking(f"Looking for volumes of {environment_id}"):
        volumes = api.client("ec2", region).describe_volumes(Filters=tagged(ENVIRONMENT_TAG, environment_id))["Volumes"]
    if things := ids + [one["VolumeId"] for one in volumes]:
        with asking(f"Tagging {environment_id}"):
            api.client("ec2", region).create_tags(Resources=things, Tags=tags_of(tags))


def _words(instance: dict[str, Any]) -> str:
    return f"instance {instance['InstanceId']} ({instance['State']['Name']})"


def _moment(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None


def _pick(choose: Any, *moments: datetime | None) -> datetime | None:
    known = [moment for moment in moments if moment]
    return choose(known) if known else None


def _spot_requests(api: Api, region: str, known: list[dict[str, Any]]) -> list[str]:
    """The spot requests of instances that could still start another."""
    ids = [one["SpotInstanceRequestId"] for one in known if one.get("SpotInstanceRequestId")]
    if not ids:
        return []
    with asking("Looking for spot requests"):
        # A filter, and not the ids themselves: one that is long gone would fail the whole question.
        filters = [{"Name": "spot-instance-request-id", "Values": ids}]
        rows = api.client("ec2", region).describe_spot_instance_requests(Filters=filters)["SpotInstanceRequests"]
    return [row["SpotInstanceRequestId"] for row in rows if row["State"] in _SPOT_REQUEST_LIVES]


def _things(api: Api, region: str, filters: Filters) -> Iterator[tuple[str, dict[str, Any]]]:
    """All but the instances: (describe call, row of its answer), in the order in which they can be deleted."""
    ec2 = api.client("ec2", region)
    for call, (answer, _, what, _) in KINDS.items():
        with asking(f"Looking for {what}s"):
            if call in _NEVER_PAGED:
                rows = ec2.describe_key_pairs(Filters=filters)[answer]
            else:
                pages = ec2.get_paginator(call).paginate(Filters=filters, PaginationConfig={"PageSize": PAGE})
                rows = [row for page in pages for row in page[answer]]
        for row in rows:
            yield call, row


def _delete(delete: Any, what: str, identity: dict[str, str]) -> None:
    with asking(f"Deleting the {what}"):
        try:
            delete(**identity)
        except ClientError as error:
            # Others have to go first, or it went by itself: the next round shows.
            if code_of(error) in ("DependencyViolation", "VolumeInUse") or "NotFound" in code_of(error):
                return
            raise
