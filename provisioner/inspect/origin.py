"""Identifies the sample for which machines are created, and decides how long they may live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from provisioner.inspect.configuration import Configuration
from provisioner.ttl import DEFAULT_TTL, MAX_TTL, checked_ttl, format_duration, parse_duration

# Beyond the sample's own time: images, boot and start before it, scoring after it.
AROUND_TIME_LIMIT = timedelta(hours=1)
# What a configured time to live must leave for boot, start and the first score, which no limit of Inspect's counts.
START = timedelta(minutes=15)
# How an eval's batch is named, by which `costs --by batch` shows it and a clean-up finds it.
BATCH_PREFIX = "inspect-"


@dataclass(frozen=True)
class Origin:
    """Identifies a sample: its eval, its Inspect task, and its limits.

    Args:
        task: Inspect's task.
        eval_id: Inspect's id of the eval.
        sample: the sample's id and epoch.
        time_limit_seconds: the sample's time limit; None for none.
        working_limit_seconds: its working limit, which does not count waits for the model; None for none.
    """

    task: str
    eval_id: str = ""
    sample: str = ""
    time_limit_seconds: float | None = None
    working_limit_seconds: float | None = None

    @property
    def batch(self) -> str:
        """The name under which the sample's costs count, or those of images that are built before an eval begins."""
        return f"{BATCH_PREFIX}{self.eval_id or 'images'}"


def time_to_live(configuration: Configuration, origin: Origin, note: Callable[[str], None]) -> timedelta:
    """Returns how long a sample's machines may live: as configured, or by the sample's limits.

    A working limit alone does not say when a sample ends, as waits for the model do not count.

    Raises:
        UsageError: the configured one is not valid.
    """
    limit = timedelta(seconds=origin.time_limit_seconds or 0)
    work = timedelta(seconds=origin.working_limit_seconds or 0)
    longest = (limit or work) * 1.5
    if configuration.ttl:
        ttl = checked_ttl(parse_duration(configuration.ttl))
        needed = longest + START if longest else timedelta()
    else:
        needed = longest + AROUND_TIME_LIMIT if longest else DEFAULT_TTL
        if not limit:
            needed = max(needed, DEFAULT_TTL)
        ttl = min(needed, MAX_TTL)
    if ttl < needed:
        advice = f"Set `ttl` to at least {format_duration(needed)} (at most {format_duration(MAX_TTL)})."
        if needed > MAX_TTL:
            advice = f"Give the sample a shorter limit: `ttl` can be at most {format_duration(MAX_TTL)}."
        note(
            f"The machines' time to live ({format_duration(ttl)}) may end before the sample does: its limit is "
            f"{format_duration(limit or work)}. {advice}"
        )
    return ttl
