"""Tests how the ledger is compared with a bill."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

from provisioner.costs.bill import DAYS, compare, period
from provisioner.costs.ledger import Entry

TODAY = date(2026, 11, 20)


def entry(name: str, days_ago: int, *, micro_usd: int | None = 500_000) -> Entry:
    launched = datetime(2026, 11, 20, 12, tzinfo=UTC) - timedelta(days=days_ago)
    return Entry(
        environment=name, kind="task", cloud="aws", region="us-east-1", family="f", task="t", batch="", project="p",
        command="c", launched_at=launched, expires_at=launched + timedelta(hours=4), reserved_micro_usd=900_000,
        ended_at=None if micro_usd is None else launched + timedelta(hours=1), actual_micro_usd=micro_usd,
    )  # fmt: skip


def test_what_both_know_differs_by_what_the_bill_says_more() -> None:
    [row] = compare([entry("a", 5)], {"a": Decimal("0.75")}, date(2026, 11, 1), TODAY)
    assert (row.state, row.ledger_usd, row.difference_usd) == ("known", Decimal("0.5"), Decimal("0.25"))


def test_what_the_bill_does_not_know_is_not_zero() -> None:
    entries = [entry("running", 5, micro_usd=None), entry("just ended", 1), entry("unbilled", 5)]
    rows = compare(entries, {"running": Decimal("0.1"), "just ended": Decimal("0.01")}, date(2026, 11, 1), TODAY)
    assert [(row.state, row.difference_usd) for row in rows] == [
        ("too early", None),
        ("too early", None),
        ("not on the bill", None),
    ]
    assert rows[0].ledger_usd == Decimal("0.9")  # what is reserved for it


def test_what_only_the_bill_knows_comes_last() -> None:
    bill = {"z": Decimal(1), "b": Decimal(2), "a": Decimal(3), "before": Decimal(4)}
    rows = compare([entry("before", 40), entry("z", 5)], bill, date(2026, 11, 1), TODAY)
    assert [(row.environment, row.state) for row in rows] == [
        ("z", "known"),
        ("a", "not in the ledger"),
        ("b", "not in the ledger"),
    ]


def test_the_bill_is_asked_for_the_days_of_the_launches() -> None:
    assert period([], TODAY) is None
    assert period([entry("a", 5), entry("b", 9)], TODAY) == (date(2026, 11, 11), date(2026, 11, 21))
    assert period([entry("a", 400)], TODAY) == (TODAY - timedelta(days=DAYS), date(2026, 11, 21))
