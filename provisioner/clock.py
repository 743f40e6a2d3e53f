"""Tells the time: the only clock for records, so that tests can set it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


def now() -> datetime:
    """Returns the current time, in UTC, as records keep it."""
    return datetime.now(UTC)


def elapsed(begin: datetime, end: datetime) -> timedelta:
    """Returns how long something took by the times in its records: nothing if the clock was set back meanwhile."""
    return max(end - begin, timedelta(0))
