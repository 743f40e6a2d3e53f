"""Which sums a launch has to fit."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import pytest

from provisioner.config import Settings, StandingBudgets
from provisioner.costs.ledger import Spending

AT = datetime(2026, 2, 28, 23, 59, tzinfo=UTC)


@pytest.mark.parametrize(
    ("spending", "limits"),
    [
        ({}, []),
        ({"budget": 2}, [("command", "c", 2_000_000, "the budget given")]),
        ({"month": "0.0000001"}, [("month", "2026-02", 1, "the budget of 2026-02")]),
        ({"projects": {"other": 1}}, []),
        ({"projects": {"p": 0}}, [("project", "p", 0, "the budget of the project p")]),
    ],
    ids=["none", "command", "month", "other-project", "project"],
)
def test_only_what_was_set_is_a_limit(spending: dict[str, object], limits: list[tuple[object, ...]]) -> None:
    spent = Spending.model_validate({"command": "c", "project": "p", **spending})
    assert [(one.scope, one.of, one.micro_usd, one.name) for one in spent.budgets(AT)] == limits


def test_every_command_has_a_name_of_its_own() -> None:
    assert Spending().command != Spending().command


def test_the_operators_settings_are_the_standing_budgets() -> None:
    budget = StandingBudgets(month=Decimal(100), projects={"p": Decimal(10)})
    spent = Spending.of(Settings(project="p", budget=budget), Decimal(5))
    assert [limit.micro_usd for limit in spent.budgets(AT)] == [5_000_000, 10_000_000, 100_000_000]
    assert spent.batch == ""
