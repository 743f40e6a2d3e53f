"""The clock of records."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from provisioner.clock import now


def test_records_are_dated_in_utc() -> None:
    before = datetime.now(UTC)
    assert now().tzinfo is UTC
    assert before <= now() <= before + timedelta(minutes=1)
