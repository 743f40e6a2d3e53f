"""How long machines may live, and durations as operators write them (90s, 30m, 1h30m, 2d). Pure.

Nothing lives without a limit; the clock starts when its record is written.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from provisioner.errors import UsageError

DEFAULT_LIMIT = timedelta(hours=4)
# Whoever needs a machine for longer than this needs another tool.
LONGEST = timedelta(days=7)
# Shorter than this, it would end before it is up.
SHORTEST = timedelta(minutes=1)
# A family image is built in minutes; some install gigabytes.
BUILDER_LIMIT = timedelta(hours=4)
# After the limit: schedules come within a minute, machines take some to end, and the cloud some to say so.
TEARDOWN = timedelta(minutes=10)
_PARTS = re.compile(r"(?:(\d{1,4})d)?(?:(\d{1,4})h)?(?:(\d{1,5})m)?(?:(\d{1,6})s)?")


def parse_duration(text: str) -> timedelta:
    """A duration of at least a second.

    Raises:
        UsageError: it is none.
    """
    found = _PARTS.fullmatch(text.strip().lower())
    if not found or not any(found.groups()):
        raise UsageError(f"{text!r} is no duration.", hint="Write it as 30m, 4h, 1h30m or 2d.")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    duration = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if not duration:
        raise UsageError(f"{text!r} is no time at all.")
    return duration


def words(duration: timedelta) -> str:
    """A duration in the same form, to the second."""
    seconds = max(0, round(duration.total_seconds()))
    parts = []
    for letter, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{count}{letter}")
    return "".join(parts) or "0s"


def checked_limit(limit: timedelta) -> timedelta:
    """A limit that an environment may have.

    Raises:
        UsageError: it is too short or too long.
    """
    if not SHORTEST <= limit <= LONGEST:
        raise UsageError(f"A time limit of {words(limit)} cannot be: {words(SHORTEST)} to {words(LONGEST)}.")
    return limit


def extended(created_at: datetime, expires_at: datetime, by: timedelta, now: datetime) -> datetime:
    """The later limit.

    Raises:
        UsageError: the limit has passed, or would be too far from the creation.
    """
    if expires_at <= now:
        raise UsageError(f"Its limit passed {words(now - expires_at)} ago: its machines have ended.")
    later = expires_at + by
    if later - created_at > LONGEST:
        raise UsageError(f"With {words(by)} more it would live longer than {words(LONGEST)}, which nothing may.")
    return later
