"""Ends machines from outside: EventBridge Scheduler terminates them, whatever their root or the controller does.

Each environment has a one-time schedule of its name, in the group that terraform/aws/network creates. Terraform creates
the schedule; this module moves it, and removes one that was forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from botocore.exceptions import ClientError

from provisioner.clouds.aws.api import Api, asking, code_of
from provisioner.errors import InfrastructureError

GROUP = "provisioner"
NOT_FOUND = "ResourceNotFoundException"


def role_name(region: str) -> str:
    """Returns the name of the role with which a region's schedules terminate instances."""
    return f"provisioner-scheduler-{region}"


def role_arn(account: str, region: str) -> str:
    """Returns the ARN of the role that terraform/aws/network creates for the schedules."""
    return f"arn:aws:iam::{account}:role/{role_name(region)}"


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
