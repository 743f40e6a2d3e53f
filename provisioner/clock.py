"""The clock of records: one place that says what time it is, so that tests can set it."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> datetime:
    """Returns the current time, in UTC, as records keep it."""
    return datetime.now(UTC)
