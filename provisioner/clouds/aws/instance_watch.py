"""Watches instances: one look at EC2 serves all threads that wait for machines of a region in this process.

EC2 answers 20 Describe requests a second in an account's region, once the first hundred are used up (Amazon EC2
developer guide, "Request throttling for the Amazon EC2 API"). A look that is throttled says nothing about a machine. An
instance that is missing from one answer may have been launched just now (EC2 API reference, "Eventual consistency"), so
it counts as gone only when a second look, some seconds later, misses it too.

Consoles can only be read one by one, at the same rate. So threads that wait for host keys take turns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from provisioner.base.errors import ThrottledError
from provisioner.clouds.aws.api import Api, asking

# The time between two looks at known instances, however many threads wait.
LOOK_SECONDS = 3.0
# The least time between any two looks, also for an instance that no look has covered yet.
PAUSE_SECONDS = 0.5
# A thread that has not asked for so long no longer waits.
FORGET_SECONDS = 60.0
# EC2 user guide, "List and filter resources": a filter takes at most 200 values.
FILTER_VALUES = 200
# No other thread runs while Python's XML parser reads an answer, and one with 200 machines is a megabyte.
PAGE = 50

# Half of what EC2 takes: other commands read consoles, too.
CONSOLES_AT_ONCE = 50.0
CONSOLES_PER_SECOND = 10.0

GONE = "terminated"
UNKNOWN = "unknown"

_watches: dict[tuple[str, str], Watch] = {}


def watch(api: Api, region: str) -> Watch:
    """Returns the watch over a region for one set of credentials."""
    return _watches.setdefault((api.profile, region), Watch(region))


class Watch:
    """What EC2 last said of the instances of a region that a thread waits for.

    Args:
        region: the region.
    """

    def __init__(self, region: str) -> None:
        self._region = region
        self._turn = threading.Condition()
        self._begun = self._ended = 0
        self._looked_at = float("-inf")
        self._wanted: dict[str, float] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._missed_at: dict[str, float] = {}
        self._gone: set[str] = set()
        self._consoles = threading.Lock()
        self._console_turns, self._console_turns_at = CONSOLES_AT_ONCE, time.monotonic()

    def state(self, api: Api, instance_id: str) -> str:
        """Returns EC2's name of an instance's state, `terminated` for one that is gone, or `unknown`.

        Raises:
            HostError, InfrastructureError: EC2 does not answer, for another reason than throttling.
        """
        self._ask(api, instance_id)
        if instance_id in self._missed_at and instance_id not in self._gone:
            time.sleep(max(0.0, self._missed_at[instance_id] + LOOK_SECONDS - time.monotonic()))
            self._ask(api, instance_id)
        if instance_id in self._gone:
            return GONE
        row = self._rows.get(instance_id)
        return str(row["State"]["Name"]) if row else UNKNOWN

    def rows(self, api: Api, instance_ids: Iterable[str]) -> list[dict[str, Any]]:
        """Returns what EC2 last said of instances, as DescribeInstances does; nothing of those that it did not name.

        Raises:
            HostError, InfrastructureError: EC2 does not answer, for another reason than throttling.
        """
        wanted = list(instance_ids)
        self._wanted |= dict.fromkeys(wanted, time.monotonic())
        for instance_id in wanted:
            self._ask(api, instance_id)
        return [self._rows[instance_id] for instance_id in wanted if instance_id in self._rows]

    def may_read_console(self) -> bool:
        """Takes a turn to read a console; False if there is none yet."""
        with self._consoles:
            now = time.monotonic()
            turns = self._console_turns + (now - self._console_turns_at) * CONSOLES_PER_SECOND
            self._console_turns, self._console_turns_at = min(CONSOLES_AT_ONCE, turns), now
            if self._console_turns < 1:
                return False
            self._console_turns -= 1
            return True

    def _ask(self, api: Api, instance_id: str) -> None:
        """Makes sure that what is known of an instance is new enough."""
        self._wanted[instance_id] = time.monotonic()
        with self._turn:
            enough = self._begun + 1  # a look that begins from now on is about this instance too
            while self._is_due(instance_id) and self._ended < enough:
                if self._begun == self._ended:
                    self._begun += 1
                    break
                self._turn.wait()
            else:
                return
        try:
            # Threads that come meanwhile are served too.
            time.sleep(max(0.0, self._looked_at + PAUSE_SECONDS - time.monotonic()))
            self._look(api)
        finally:
            with self._turn:
                self._ended += 1
                self._turn.notify_all()

    def _is_due(self, instance_id: str) -> bool:
        now = time.monotonic()
        if instance_id in self._missed_at and instance_id not in self._gone:
            return now - self._missed_at[instance_id] >= LOOK_SECONDS
        known = instance_id in self._rows or instance_id in self._gone
        return not known or now - self._looked_at >= LOOK_SECONDS

    def _look(self, api: Api) -> None:
        now = time.monotonic()
        wanted = [name for name, at in list(self._wanted.items()) if now - at < FORGET_SECONDS]
        try:
            rows = {row["InstanceId"]: row for row in self._describe(api, wanted)}
        except ThrottledError:
            return  # what was known before still counts
        finally:
            self._looked_at = time.monotonic()
        self._rows = rows
        for name in wanted:
            if name in rows:
                self._missed_at.pop(name, None)
                self._gone.discard(name)
            elif now - self._missed_at.setdefault(name, now) >= LOOK_SECONDS:
                self._gone.add(name)
        for name in [name for name in list(self._wanted) if name not in wanted]:
            del self._wanted[name]
            self._missed_at.pop(name, None)
            self._gone.discard(name)

    def _describe(self, api: Api, instance_ids: list[str]) -> Iterator[dict[str, Any]]:
        """Asks by a filter: an id that EC2 does not know would fail the whole request."""
        paginator = api.client("ec2", self._region).get_paginator("describe_instances")
        for first in range(0, len(instance_ids), FILTER_VALUES):
            filters = [{"Name": "instance-id", "Values": instance_ids[first : first + FILTER_VALUES]}]
            with asking("Looking for machines"):
                for page in paginator.paginate(Filters=filters, PaginationConfig={"PageSize": PAGE}):
                    yield from (row for group in page["Reservations"] for row in group["Instances"])


def metadata_is_off(instances: Iterable[Mapping[str, Any]], instance_ids: Iterable[str]) -> bool:
    """Whether the metadata service of each machine is off, and that has taken effect. Pure.

    Args:
        instances: what EC2 says; a machine that it does not name may have its service on.
        instance_ids: the machines' ids, at least one.
    """
    options = {instance["InstanceId"]: instance["MetadataOptions"] for instance in instances}
    machines = [options.get(instance_id, {}) for instance_id in instance_ids]
    return bool(machines) and all(
        machine.get("HttpEndpoint") == "disabled" and machine.get("State") == "applied" for machine in machines
    )
