"""The limit outside the machines: EventBridge Scheduler terminates them, whatever their root or we do.

One one-shot schedule for each environment, named after it, in the group that terraform/aws/network makes. Terraform
makes the schedule; what moves it and what removes a forgotten one is here.
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
    """The name of the role by which a region's schedules end instances."""
    return f"provisioner-scheduler-{region}"


def role_arn(account: str, region: str) -> str:
    """The role that terraform/aws/network makes for the schedules."""
    return f"arn:aws:iam::{account}:role/{role_name(region)}"


def moment(when: datetime) -> str:
    """A time as schedules write it, in UTC (EventBridge Scheduler user guide, "One-time schedules")."""
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")


def names(api: Api, region: str, environment_id: str = "") -> Iterator[str]:
    """The environments that have a schedule.

    Args:
        environment_id: only this one; empty for all.
    """
    with asking("Listing schedules"):
        pages = api.client("scheduler", region).get_paginator("list_schedules")
        only = {"NamePrefix": environment_id} if environment_id else {}
        try:
            for page in pages.paginate(GroupName=GROUP, **only):
                yield from (one["Name"] for one in page["Schedules"] if environment_id in ("", one["Name"]))
        except ClientError as error:
            if code_of(error) != NOT_FOUND:  # no group: no network of ours, and so nothing else
                raise


def move(api: Api, region: str, environment_id: str, when: datetime) -> None:
    """Moves an environment's schedule.

    Raises:
        InfrastructureError: it has none, or AWS refuses.
    """
    scheduler = api.client("scheduler", region)
    with asking(f"Moving the schedule of {environment_id}"):
        try:
            known = scheduler.get_schedule(GroupName=GROUP, Name=environment_id)
        except ClientError as error:
            if code_of(error) == NOT_FOUND:
                raise InfrastructureError(f"{environment_id} has no schedule that could be moved.") from error
            raise
        scheduler.update_schedule(
            GroupName=GROUP,
            Name=environment_id,
            ScheduleExpression=f"at({moment(when)})",
            ScheduleExpressionTimezone="UTC",
            FlexibleTimeWindow={"Mode": "OFF"},
            # UpdateSchedule puts its defaults in place of all that is not said again.
            Description=known["Description"],
            State=known["State"],
            Target=known["Target"],
        )


def remove(api: Api, region: str, environment_id: str) -> None:
    """Deletes an environment's schedule. Safe to repeat."""
    with asking(f"Deleting the schedule of {environment_id}"):
        try:
            api.client("scheduler", region).delete_schedule(GroupName=GROUP, Name=environment_id)
        except ClientError as error:
            if code_of(error) != NOT_FOUND:
                raise
