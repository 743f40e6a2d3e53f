"""Tells the time: the only clock for records, so that tests can set it."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> datetime:
    """Returns the current time, in UTC, as records keep it."""
    return datetime.now(UTC)
