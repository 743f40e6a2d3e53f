"""Ends machines from outside: EventBridge Scheduler terminates them, whatever their root or the controller does.

Each machine has a one-time schedule, in a group that all homes of the account share and none deletes. Terraform creates
the schedules; this module moves them, and removes those that were forgotten. An administrator makes the role
(clouds/aws/setup.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime

from botocore.exceptions import ClientError

from provisioner.base.errors import HostError, InfrastructureError
from provisioner.clouds.aws.api import Api, asking, code_of

GROUP = "provisioner"
ROLE = "provisioner-scheduler"
NOT_FOUND = "ResourceNotFoundException"


def role_arn(account: str) -> str:
    """Returns the ARN of the role with which schedules terminate instances."""
    return f"arn:aws:iam::{account}:role/{ROLE}"


def require_role(api: Api, account: str) -> None:
    """Checks that the schedules' role exists, without which no machine could be ended at its limit.

    Raises:
        HostError: an administrator has not set the account up.
    """
    iam = api.client("iam")
    with asking(f"Looking for the role {ROLE}"):
        try:
            iam.get_role(RoleName=ROLE)
        except iam.exceptions.NoSuchEntityException as error:
            raise HostError(
                f"The account {account} is not set up: it has no role {ROLE}, so no schedule could end a machine at "
                "its time limit.",
                hint="Have an administrator run `provisioner aws setup` once; `provisioner aws policy setup` prints "
                "the rights for it.",
            ) from error


def require_group(api: Api, region: str) -> None:
    """Creates the region's group of schedules unless it exists."""
    scheduler = api.client("scheduler", region)
    with asking(f"Looking for the group of schedules in {region}"):
        try:
            scheduler.get_schedule_group(Name=GROUP)
        except ClientError as error:
            if code_of(error) != NOT_FOUND:
                raise
            # Another controller may have been faster.
            with contextlib.suppress(scheduler.exceptions.ConflictException):
                scheduler.create_schedule_group(Name=GROUP)


def moment(when: datetime) -> str:
    """Formats a time as schedules take it, in UTC (EventBridge Scheduler user guide, "One-time schedules")."""
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")


def name_of(environment_id: str, role: str) -> str:
    """Returns the name that terraform/aws/environment gives the schedule of a machine."""
    return f"{environment_id}.{role}"


def environment_of(name: str) -> str:
    """Returns the environment to which a schedule belongs."""
    return name.partition(".")[0]


def names(api: Api, region: str, environment_id: str = "") -> Iterator[str]:
    """Lists the names of schedules.

    Args:
        environment_id: only those of this environment's machines; empty for all.
    """
    return (name for name, _ in with_creation(api, region, environment_id))


def with_creation(api: Api, region: str, environment_id: str = "") -> Iterator[tuple[str, datetime | None]]:
    """Lists the names of schedules, and when each was created.

    Args:
        environment_id: only those of this environment's machines; empty for all.
    """
    with asking("Listing schedules"):
        pages = api.client("scheduler", region).get_paginator("list_schedules")
        only = {"NamePrefix": environment_id} if environment_id else {}
        try:
            for page in pages.paginate(GroupName=GROUP, **only):
                scheduled = [(str(schedule["Name"]), schedule.get("CreationDate")) for schedule in page["Schedules"]]
                yield from (pair for pair in scheduled if environment_id in ("", environment_of(pair[0])))
        except ClientError as error:
            if code_of(error) != NOT_FOUND:  # without the group there is no network of ours, and so nothing else
                raise


def move(api: Api, region: str, environment_id: str, when: datetime) -> None:
    """Moves the schedules of an environment's machines.

    Raises:
        InfrastructureError: it has none, or AWS refuses.
    """
    scheduler = api.client("scheduler", region)
    scheduled = list(names(api, region, environment_id))
    if not scheduled:
        raise InfrastructureError(f"{environment_id} has no schedule to move.")
    with asking(f"Moving the schedules of {environment_id}"):
        for name in scheduled:
            schedule = scheduler.get_schedule(GroupName=GROUP, Name=name)
            scheduler.update_schedule(
                GroupName=GROUP,
                Name=name,
                ScheduleExpression=f"at({moment(when)})",
                ScheduleExpressionTimezone="UTC",
                FlexibleTimeWindow={"Mode": "OFF"},
                # UpdateSchedule resets to its default whatever is not given again.
                Description=schedule["Description"],
                State=schedule["State"],
                Target=schedule["Target"],
            )


def remove(api: Api, region: str, environment_id: str) -> None:
    """Deletes the schedules of an environment's machines. Safe to repeat."""
    scheduler = api.client("scheduler", region)
    for name in list(names(api, region, environment_id)):
        with asking(f"Deleting the schedule {name}"):
            try:
                scheduler.delete_schedule(GroupName=GROUP, Name=name)
            except ClientError as error:
                if code_of(error) != NOT_FOUND:
                    raise
