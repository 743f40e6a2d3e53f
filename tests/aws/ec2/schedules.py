"""Adds to moto's EventBridge Scheduler: when the time of a one-shot schedule comes, its instances end."""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime

import botocore.session
from botocore.exceptions import ParamValidationError
from botocore.validate import validate_parameters
from moto.ec2.models import ec2_backends
from moto.scheduler.models import Schedule, scheduler_backends

TERMINATE = "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances"
_AT = re.compile(r"at\((\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2})\)")


def _instance_ids(schedule: Schedule) -> list[str]:
    """Returns the instances that a schedule ends; none if TerminateInstances does not know one of its parameters."""
    given = json.loads(schedule.target["Input"])
    model = botocore.session.get_session().get_service_model("ec2").operation_model("TerminateInstances")
    try:
        validate_parameters(given, model.input_shape)
    except ParamValidationError as error:
        print(f"the schedule {schedule.name} does nothing: {error}", file=sys.stderr, flush=True)
        return []
    return list(given["InstanceIds"])


class Schedules:
    """Ends instances at their scheduled time, once, although the schedule remains."""

    def __init__(self) -> None:
        self._done: set[tuple[str, str]] = set()

    def act(self) -> None:
        """Carries out the schedules that are due."""
        for account, regions in list(scheduler_backends.items()):
            for region, backend in list(regions.items()):
                for group in list(backend.schedule_groups.values()):
                    for schedule in list(group.schedules.values()):
                        if self._is_due(schedule):
                            self._done.add((schedule.arn, schedule.schedule_expression))
                            if ids := _instance_ids(schedule):
                                ec2_backends[account][region].terminate_instances(ids)

    def _is_due(self, schedule: Schedule) -> bool:
        at = _AT.fullmatch(schedule.schedule_expression)
        if not at or schedule.target["Arn"] != TERMINATE or schedule.schedule_expression_timezone != "UTC":
            return False
        if (schedule.arn, schedule.schedule_expression) in self._done:
            return False
        return datetime.fromisoformat(at[1]).replace(tzinfo=UTC) <= datetime.now(UTC)
