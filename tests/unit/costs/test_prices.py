"""Money: rounded up, so that a sum of reservations is never too small."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest
from pydantic import ValidationError

from provisioner.costs.prices import (
    CostLine,
    Price,
    cost,
    cost_between,
    dollars,
    hourly,
    micro_usd,
    worst_hourly,
)


def line(usd: str, worst: str) -> CostLine:
    return CostLine(
        what="m", usd_per_hour=Decimal(usd), worst_usd_per_hour=Decimal(worst), source="s", as_of=date(2026, 1, 1)
    )


@pytest.mark.parametrize(
    ("usd", "seconds", "micro"),
    [
        ("1", 3600, 1_000_000),
        ("3.6", 1, 60_000),
        ("3.6", 60, 60_000),
        ("3.6", 60.001, 61_000),
        ("0.0000001", 3600, 1),
        ("0", 3600, 0),
        ("1", -5, 16_667),
    ],
    ids=["hour", "second", "minute", "begun-second", "tiny", "free", "negative"],
)
def test_a_cost_is_by_the_second_with_a_minute_at_least(usd: str, seconds: float, micro: int) -> None:
    assert cost(Decimal(usd), timedelta(seconds=seconds)) == micro
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    assert cost_between(Decimal(usd), begin, begin + timedelta(seconds=seconds)) == micro


@pytest.mark.parametrize(("usd", "micro"), [("0", 0), ("0.000001", 1), ("0.0000011", 2), ("12.5", 12_500_000)], ids=str)
def test_dollars_become_millionths_rounded_up(usd: str, micro: int) -> None:
    assert micro_usd(Decimal(usd)) == micro


@pytest.mark.parametrize(
    ("micro", "text"),
    [(0, "0.0000 USD"), (1, "0.0001 USD"), (100, "0.0001 USD"), (101, "0.0002 USD"), (1_234_567_890, "1234.5679 USD")],
    ids=str,
)
def test_amounts_for_people_are_rounded_up(micro: int, text: str) -> None:
    assert dollars(micro) == text


def test_lines_are_added_up_exactly() -> None:
    lines = [line("0.1", "0.3"), line("0.2", "0.4")]
    assert (hourly(lines), worst_hourly(lines)) == (Decimal("0.3"), Decimal("0.7"))
    assert (hourly([]), worst_hourly([])) == (Decimal(0), Decimal(0))


def test_a_price_tells_its_age() -> None:
    assert line("1", "1").age_days(date(2026, 3, 1)) == 59


@pytest.mark.parametrize("usd", ["0", "-1", "NaN", "Infinity"])
def test_no_price_is_none_or_nothing(usd: str) -> None:
    with pytest.raises(ValidationError):
        Price(usd=Decimal(usd), source="s", as_of=date(2026, 1, 1))
