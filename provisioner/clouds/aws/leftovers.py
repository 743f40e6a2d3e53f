"""What still exists of an environment, asked of EC2 by tag, and its removal, whatever Terraform believes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from botocore.exceptions import ClientError

from provisioner.clouds.aws.api import Api, asking, code_of, tagged

ENVIRONMENT_TAG = "provisioner:environment"
GONE_SECONDS = 300
POLL_SECONDS = 2.0
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


def instances(api: Api, region: str, environment_id: str) -> list[dict[str, Any]]:
    """The environment's instances, as DescribeInstances tells them; AWS shows terminated ones for about an hour."""
    with asking(f"Looking for the machines of {environment_id}"):
        pages = api.client("ec2", region).get_paginator("describe_instances")
        return [
            instance
            for page in pages.paginate(Filters=tagged(ENVIRONMENT_TAG, environment_id))
            for reservation in page["Reservations"]
            for instance in reservation["Instances"]
        ]


def left(api: Api, region: str, environment_id: str) -> list[str]:
    """What still exists, in words; empty: nothing does."""
    found = [
        f"instance {one['InstanceId']} ({one['State']['Name']})"
        for one in instances(api, region, environment_id)
        if one["State"]["Name"] != "terminated"
    ]
    return found + [f"{KINDS[call][2]} {identity}" for call, identity in _things(api, region, environment_id)]


def remove(api: Api, region: str, environment_id: str) -> None:
    """Terminates the instances, waits for their end, then deletes the rest. Safe to repeat.

    What will not go within five minutes stays, and `left` still tells it.
    """
    ec2 = api.client("ec2", region)
    deadline = time.monotonic() + GONE_SECONDS
    alive = [
        one["InstanceId"]
        for one in instances(api, region, environment_id)
        if one["State"]["Name"] not in ("terminated", "shutting-down")
    ]
    if alive:
        with asking(f"Terminating the machines of {environment_id}"):
            ec2.terminate_instances(InstanceIds=alive)
    while time.monotonic() < deadline:
        states = {one["State"]["Name"] for one in instances(api, region, environment_id)}
        if states <= {"terminated"}:
            break
        time.sleep(POLL_SECONDS)
    while True:
        things = list(_things(api, region, environment_id))
        for call, identity in things:
            _, key, what, delete = KINDS[call]
            _delete(getattr(ec2, delete), what, {key: identity})
        if not things or time.monotonic() > deadline:
            return
        time.sleep(POLL_SECONDS)


def _things(api: Api, region: str, environment_id: str) -> Iterator[tuple[str, str]]:
    """All but the instances: (describe call, id), in the order in which they can be deleted."""
    ec2 = api.client("ec2", region)
    filters = tagged(ENVIRONMENT_TAG, environment_id)
    for call, (answer, key, what, _) in KINDS.items():
        with asking(f"Looking for {what}s of {environment_id}"):
            if call in _NEVER_PAGED:
                rows = ec2.describe_key_pairs(Filters=filters)[answer]
            else:
                rows = [row for page in ec2.get_paginator(call).paginate(Filters=filters) for row in page[answer]]
        for row in rows:
            yield call, str(row[key])


def _delete(delete: Any, what: str, identity: dict[str, str]) -> None:
    with asking(f"Deleting the {what}"):
        try:
            delete(**identity)
        except ClientError as error:
            # Others have to go first, or it went by itself: the next round shows.
            if code_of(error) in ("DependencyViolation", "VolumeInUse") or "NotFound" in code_of(error):
                return
            raise
