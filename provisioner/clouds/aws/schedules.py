"""Ends machines from outside: EventBridge Scheduler terminates them, whatever their root or the controller does.

Each environment has a one-time schedule of its name, in a group that all homes of the account share and none deletes.
Terraform creates the schedule; this module moves it, and removes one that was forgotten. An administrator makes the
role (setup.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime

from botocore.exceptions import ClientError

from provisioner.clouds.aws.api import Api, asking, code_of
from provisioner.errors import HostError, InfrastructureError

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
                hint="Have an administrator run `provisioner aws setup` once; `provisioner aws policy --setup` prints "
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


def names(api: Api, region: str, environment_id: str = "") -> Iterator[str]:
    """Lists the environments that have a schedule.

    Args:
        environment_id: look only for this one; empty for all.
    """
    with asking("Listing schedules"):
        pages = api.client("scheduler", region).get_paginator("list_schedules")
        only = {"NamePrefix": environment_id} if environment_id else {}
        try:
            for page in pages.paginate(GroupName=GROUP, **only):
                scheduled = [str(schedule["Name"]) for schedule in page["Schedules"]]
                yield from (name for name in scheduled if environment_id in ("", name))
        except ClientError as error:
            if code_of(error) != NOT_FOUND:  # without the group there is no network of ours, and so nothing else
                raise


def move(api: Api, region: str, environment_id: str, when: datetime) -> None:
    """Moves an environment's schedule.

    Raises:
        InfrastructureError: it has none, or AWS refuses.
    """
    scheduler = api.client("scheduler", region)
    with asking(f"Moving the schedule of {environment_id}"):
        try:
            schedule = scheduler.get_schedule(GroupName=GROUP, Name=environment_id)
        except ClientError as error:
            if code_of(error) == NOT_FOUND:
                raise InfrastructureError(f"{environment_id} has no schedule to move.") from error
            raise
        scheduler.update_schedule(
            GroupName=GROUP,
            Name=environment_id,
            ScheduleExpression=f"at({moment(when)})",
            ScheduleExpressionTimezone="UTC",
            FlexibleTimeWindow={"Mode": "OFF"},
            # UpdateSchedule resets to its default whatever is not given again.
            Description=schedule["Description"],
            State=schedule["State"],
            Target=schedule["Target"],
        )


def remove(api: Api, region: str, environment_id: str) -> None:
    """Deletes an environment's schedule. Safe to repeat."""
    with asking(f"Deleting the schedule of {environment_id}"):
        try:
            api.client("scheduler", region).delete_schedule(GroupName=GROUP, Name=environment_id)
        except ClientError as error:
            if code_of(error) != NOT_FOUND:
                raise
