"""How many vCPUs an account may run in a region, how many run, and how many environments fit.

Each market has quotas of its own, and each counts the vCPUs of whole families of instance types: of all standard ones
together, so that another type does not help (Amazon EC2 user guide, "Amazon EC2 instance type quotas").
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from provisioner.base.errors import HostError, InfrastructureError, UsageError
from provisioner.clouds.aws.api import Api, asking

Market = Literal["on-demand", "spot"]
MARKETS: tuple[Market, ...] = ("on-demand", "spot")
# Service Quotas, Amazon EC2: "Running On-Demand ... instances" and "All ... Spot Instance Requests".
CODES: dict[str, dict[Market, str]] = {
    "Standard": {"on-demand": "L-1216C47A", "spot": "L-34B43A08"},
    "DL": {"on-demand": "L-6E869C2A", "spot": "L-85EED4F7"},
    "F": {"on-demand": "L-74FC7D96", "spot": "L-88CF9481"},
    "G and VT": {"on-demand": "L-DB2E81BA", "spot": "L-3819A6DF"},
    "Inf": {"on-demand": "L-1945791B", "spot": "L-B5D1601B"},
    "P": {"on-demand": "L-417A185B", "spot": "L-7212CCBC"},
    "Trn": {"on-demand": "L-2C3B7624", "spot": "L-5480EFD2"},
    "X": {"on-demand": "L-7295265B", "spot": "L-E3A00192"},
}
STANDARD = "Standard"
_STANDARD_LETTERS = frozenset("acdhimrtz")
_OTHERS = {"dl": "DL", "f": "F", "g": "G and VT", "gr": "G and VT", "vt": "G and VT", "inf": "Inf", "p": "P",
           "trn": "Trn", "x": "X"}  # fmt: skip
_UNCOUNTED = frozenset({"hpc", "mac", "u"})
COUNTED_STATES = ["pending", "running"]
# Between two counts of what runs.
LOOK_SECONDS = 5.0


@dataclass(frozen=True)
class Room:
    """A quota and its use, in vCPUs."""

    quota: int
    used: int

    @property
    def left(self) -> int:
        """How many vCPUs may still be launched."""
        return max(0, self.quota - self.used)


def family(instance_type: str) -> str | None:
    """Returns the group of families under whose quota a type counts; None if it has a quota of another kind."""
    letters = re.match(r"[a-z]+", instance_type)
    name = letters[0] if letters else ""
    if name in _UNCOUNTED:
        return None
    return _OTHERS.get(name) or (STANDARD if name[:1] in _STANDARD_LETTERS else None)


def needs(types: Iterable[str], vcpus: Mapping[str, int]) -> dict[str, int]:
    """Sums the vCPUs of machines by the group of their type. What is not known counts as nothing. Pure."""
    sums: dict[str, int] = {}
    for name in types:
        if (group := family(name)) and name in vcpus:
            sums[group] = sums.get(group, 0) + vcpus[name]
    return sums


class Quotas:
    """An account's quotas in one region. Each is asked for once; what runs, at most every few seconds.

    Args:
        vcpus: of each instance type that is known.
    """

    def __init__(self, api: Api, region: str, vcpus: Mapping[str, int]) -> None:
        self._api = api
        self._region = region
        self._vcpus = vcpus
        self._known: dict[str, int | None] = {}
        self._running: list[dict[str, Any]] = []
        self._looked_at = float("-inf")

    def quota(self, group: str, market: Market) -> int | None:
        """Returns a quota in vCPUs; None if AWS does not say."""
        code = CODES[group][market]
        if code not in self._known:
            try:
                with asking("Asking for the quota of vCPUs"):
                    client = self._api.client("service-quotas", self._region)
                    answer = client.get_service_quota(ServiceCode="ec2", QuotaCode=code)
                self._known[code] = int(answer["Quota"]["Value"])
            except (HostError, InfrastructureError, UsageError):
                self._known[code] = None
        return self._known[code]

    def room(self, group: str, market: Market) -> Room | None:
        """Returns a quota and its use, by whatever the account runs in the region; None if AWS does not say."""
        quota = self.quota(group, market)
        if quota is None:
            return None
        try:
            running = self._instances()
        except (HostError, InfrastructureError):
            return None
        counted = [
            instance
            for instance in running
            if (instance.get("InstanceLifecycle") == "spot") == (market == "spot")
            and family(str(instance["InstanceType"])) == group
        ]
        used = 0
        for instance in counted:
            options = instance.get("CpuOptions") or {}
            actual = int(options.get("CoreCount") or 1) * int(options.get("ThreadsPerCore") or 1)
            used += self._vcpus.get(str(instance["InstanceType"]), actual)
        return Room(quota, used)

    def _instances(self) -> list[dict[str, Any]]:
        """Returns what runs. The instance type's own number of vCPUs counts, whatever an instance was given."""
        if time.monotonic() - self._looked_at > LOOK_SECONDS:
            with asking("Counting running instances"):
                pages = self._api.client("ec2", self._region).get_paginator("describe_instances").paginate(
                    Filters=[{"Name": "instance-state-name", "Values": COUNTED_STATES}]
                )  # fmt: skip
                self._running = [one for page in pages for row in page["Reservations"] for one in row["Instances"]]
            self._looked_at = time.monotonic()
        return self._running
