"""Adds to moto's EventBridge Scheduler: when the time of a one-shot schedule comes, its instances end."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime

from moto.ec2.models import ec2_backends
from moto.scheduler.models import Schedule, scheduler_backends

TERMINATE = "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances"
_AT = re.compile(r"at\((\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2})\)")


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
                            ids = json.loads(schedule.target["Input"])["InstanceIds"]
                            ec2_backends[account][region].terminate_instances(ids)

    def _is_due(self, schedule: Schedule) -> bool:
        at = _AT.fullmatch(schedule.schedule_expression)
        if not at or schedule.target["Arn"] != TERMINATE or schedule.schedule_expression_timezone != "UTC":
            return False
        if (schedule.arn, schedule.schedule_expression) in self._done:
            return False
        return datetime.fromisoformat(at[1]).replace(tzinfo=UTC) <= datetime.now(UTC)
