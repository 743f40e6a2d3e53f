"""Tells the time, by the only clock for records, and checks times to live and durations such as 90s, 1h30m or 2d.

Every environment has a time to live, which starts when its record is written.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

from provisioner.base.errors import UsageError


def now() -> datetime:
    """Returns the current time, in UTC, as records keep it."""
    return datetime.now(UTC)


def elapsed(begin: datetime, end: datetime) -> timedelta:
    """Returns how long something took by the times in its records: nothing if the clock was set back meanwhile."""
    return max(end - begin, timedelta(0))


@contextlib.contextmanager
def overdue(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """Calls a function, in a thread of its own, if the body takes longer."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


DEFAULT_TTL = timedelta(hours=4)
# The longest time to live; provisioner is not meant for longer-lived machines.
MAX_TTL = timedelta(days=7)
# An environment with a shorter time to live would end before it is up.
MIN_TTL = timedelta(minutes=1)
# Most family images are built in minutes, but some install gigabytes.
BUILDER_TTL = timedelta(hours=4)
# After the time to live: schedules may be a minute late, and machines and the cloud take minutes to end them.
TEARDOWN = timedelta(minutes=10)
_PARTS = re.compile(r"(?:(\d{1,4})d)?(?:(\d{1,4})h)?(?:(\d{1,5})m)?(?:(\d{1,6})s)?")


def parse_duration(text: str) -> timedelta:
    """Parses a duration of at least a second.

    Raises:
        UsageError: the text is not such a duration.
    """
    match = _PARTS.fullmatch(text.strip().lower())
    if not match or not any(match.groups()):
        number = text.strip()
        unit = f"Say the unit: {number}h for hours, {number}m for minutes." if re.fullmatch(r"\d{1,4}", number) else ""
        raise UsageError(f"{text!r} is not a duration.", hint=unit or "Write it as 30m, 4h, 1h30m or 2d.")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    duration = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if not duration:
        raise UsageError(f"A duration must be at least 1s, not {text!r}.")
    return duration


def format_duration(duration: timedelta) -> str:
    """Formats a duration in the same form, rounded to seconds."""
    seconds = max(0, round(duration.total_seconds()))
    parts = []
    for letter, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{count}{letter}")
    return "".join(parts) or "0s"


def checked_ttl(ttl: timedelta) -> timedelta:
    """Checks a time to live and returns it.

    Raises:
        UsageError: it is too short or too long.
    """
    if not MIN_TTL <= ttl <= MAX_TTL:
        raise UsageError(
            f"The time to live must be between {format_duration(MIN_TTL)} and {format_duration(MAX_TTL)}, "
            f"not {format_duration(ttl)}."
        )
    return ttl


def extended(created_at: datetime, expires_at: datetime, by: timedelta, now: datetime) -> datetime:
    """Returns the end of an extended time to live.

    Args:
        created_at: the environment's creation.
        expires_at: the end of its time to live so far.
        by: how much longer it may live.
        now: the current time.

    Raises:
        UsageError: the time to live has ended, or would become too long.
    """
    if expires_at <= now:
        raise UsageError(f"Its time to live ended {format_duration(now - expires_at)} ago, and its machines with it.")
    later = expires_at + by
    if later - created_at > MAX_TTL:
        raise UsageError(
            f"With {format_duration(by)} more its time to live would exceed the maximum of {format_duration(MAX_TTL)}."
        )
    return later
