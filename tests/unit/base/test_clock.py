"""The clock of records."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.base.clock import MAX_TTL, checked_ttl, extended, format_duration, now, parse_duration
from provisioner.base.errors import UsageError
from tests.unit.conftest import CommandLine


def test_records_are_dated_in_utc() -> None:
    before = datetime.now(UTC)
    assert now().tzinfo is UTC
    assert before <= now() <= before + timedelta(minutes=1)


BEGIN = datetime(2026, 1, 2, 3, tzinfo=UTC)
HOUR = timedelta(hours=1)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("4h", 14400), ("1h30m", 5400), ("2d", 172800), (" 1H ", 3600), ("1d1h1m1s", 90061)],
)
def test_durations_are_read(text: str, seconds: int) -> None:
    assert parse_duration(text).total_seconds() == seconds


@pytest.mark.parametrize(
    "text", ["", "4", "h", "-1h", "1.5h", "0s", "0h0m", "1h 2m", "4h4", "99999999s", "1m1h", "∞", "never"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_duration(text)


@given(st.integers(1, 9999 * 86400))
def test_formatted_durations_can_be_parsed(seconds: int) -> None:
    assert parse_duration(format_duration(timedelta(seconds=seconds))).total_seconds() == seconds


@pytest.mark.parametrize("limit", [timedelta(seconds=59), MAX_TTL + timedelta(seconds=1)])
def test_nothing_lives_for_a_moment_or_for_ever(limit: timedelta) -> None:
    with pytest.raises(UsageError, match="must be between 1m and 7d"):
        checked_ttl(limit)
    assert checked_ttl(HOUR) == HOUR


def test_a_limit_moves_only_within_its_bounds() -> None:
    end = BEGIN + 4 * HOUR
    assert extended(BEGIN, end, HOUR, BEGIN + HOUR) == end + HOUR
    with pytest.raises(UsageError, match="ended 1h ago"):
        extended(BEGIN, end, HOUR, end + HOUR)
    with pytest.raises(UsageError, match="maximum of 7d"):
        extended(BEGIN, end, MAX_TTL, BEGIN)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--ttl", "0s"),
        ("--ttl", "never"),
        ("--ttl", "30d"),
        ("--budget", "much"),
        ("--budget", "-1"),
        ("--budget", "nan"),
    ],
)
def test_a_bad_limit_or_budget_is_refused_before_creation(provisioner: CommandLine, arguments: tuple[str, str]) -> None:
    for command in (("up",), ("run", "--submission-file", "README.md"), ("test",)):
        refused = provisioner(*command, "examples/number_guess", "easy", *arguments)
        assert (refused.code, "Traceback" in refused.stderr) == (2, False), refused.stderr
    assert not list(provisioner.home.glob("environments/*"))
    assert not (provisioner.home / "ledger.sqlite").exists()


def test_what_cannot_be_extended_or_swept_is_told(provisioner: CommandLine) -> None:
    for arguments in (
        ("extend", "nobody", "1h"), ("extend", "nobody", "soon"), ("extend", "nobody"),
        ("sweep", "--older-than", "soon"), ("sweep", "--region", "eu-west-1"), ("sweep", "--cloud", "moon"),
    ):  # fmt: skip
        refused = provisioner(*arguments)
        assert (refused.code, "Traceback" in refused.stderr) == (2, False), arguments
    assert provisioner("sweep").stdout == "Nothing to remove.\n"
    assert provisioner("sweep", "--json", "--dry-run").json["found"] == []
