"""Tests how the helper converts the values that a family returns."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from provisioner.clouds.guest_files import GUEST
from tests.unit.guest.machine_directory import Machine

PLAIN = {
    "0.5": 0.5,
    "-3": -3,
    "None": None,
    "True": True,
    "'1.0'": "1.0",
    "[1, (2, 3)]": [1, [2, 3]],
    "{1: {'a': None}}": {"1": {"a": None}},
    "float('inf')": math.inf,
    "float('nan')": math.nan,
    "__import__('decimal').Decimal('0.25')": 0.25,
    "__import__('fractions').Fraction(1, 4)": 0.25,
    "b'bytes'": "b'bytes'",
    "{1}": "{1}",
    "object": "<class 'object'>",
    "Odd()": "<Odd without a repr>",
}
ODD = "class Odd:\n    def __repr__(self):\n        raise RuntimeError('no')\n"
NUMPY = {
    "numpy.float64(0.5)": 0.5,
    "numpy.float32(0.5)": 0.5,
    "numpy.longdouble(0.5)": 0.5,
    "numpy.int64(3)": 3,
    "numpy.bool_(True)": True,
    "numpy.array([[1, 2], [3, 4]])": [[1, 2], [3, 4]],
    "{numpy.int64(1): numpy.arange(2)}": {"1": [0, 1]},
    "pandas.Series([1.5, 2.5])": [1.5, 2.5],
    "pandas.DataFrame({'a': [1, 2]})": [{"a": 1}, {"a": 2}],
    "pandas.NA": "<NA>",
}


@pytest.mark.parametrize(
    ("expected", "before"), [(PLAIN, ODD), (NUMPY, "import numpy, pandas\n")], ids=["plain", "numpy"]
)
def test_values_come_back_as_json_has_them(machine: Machine, expected: dict[str, object], before: str) -> None:
    values = machine.score(f"return [{', '.join(expected)}]", before=before).value
    # As JSON, since 1, 1.0 and True are equal, and two NaN are not.
    assert json.dumps(dict(zip(expected, values, strict=True))) == json.dumps(expected)


@pytest.mark.parametrize(
    "body",
    [
        "return 'x' * 9_000_000",
        "return '\\u00e9' * 3_000_000",
        # It is encoded up to the limit, which takes a quarter of a minute.
        pytest.param("a = []\nfor _ in range(50): a = [a, a]\nreturn a", id="nested", marks=pytest.mark.campaign),
    ],
)
def test_a_value_that_is_too_large_is_an_error_of_its_own(machine: Machine, body: str) -> None:
    assert machine.score(body).result["kind"] == "too_large"


CLASSES = """
import collections, dataclasses, datetime, pathlib, re, sys
sys.path.insert(0, sys.argv[1])
from provisioner_guest.family.results import fingerprint

@dataclasses.dataclass
class Fields:
    value: object

@dataclasses.dataclass(slots=True)
class Slots:
    value: object

class Plain:
    def __init__(self, value=None):
        self.value = value

names = {"x", "y", "z", "long", "short"}
def function(): pass
"""


EQUAL = (
    "names",
    "Fields(names)",
    "Slots(names)",
    "Plain(names)",
    "{frozenset(names): 1}",
    "{Plain, Fields}",
    "{frozenset((n, n[0])): n for n in names}",
    "{frozenset((n, m)) for n in names for m in names}",
    "[{Plain(n) for n in names}, {n: 1 for n in names}.keys()]",
    "collections.deque([names])",
    "[function, lambda: 1, [].append, re, object(), pathlib.Path('/a'), re.compile('a'), datetime.timedelta(1)]",
)
DIFFERENT = (
    ("Fields({1})", "Fields({2})"),
    ("Slots([1])", "Slots([2])"),
    ("Plain(1)", "Fields(1)"),
    ("{frozenset({1}): 1}", "{frozenset({2}): 1}"),
    ("{1: 2}", "{'1': 2}"),
    ("b'a' * 20_000", "b'a' * 20_001"),
    ("pathlib.Path('/a')", "pathlib.Path('/b')"),
    ("datetime.date(2026, 1, 1)", "datetime.date(2026, 1, 2)"),
    ("[len, function]", "[print, function]"),
)


def _fingerprints(*expressions: str) -> list[set[str]]:
    """Returns those of each expression in three processes, in which sets have other orders."""
    code = f"{CLASSES}\nfor value in [{', '.join(expressions)}]:\n    print(fingerprint(value))\n"
    command, lines = [sys.executable, "-B", "-c", code, str(GUEST)], []
    for seed in ("1", "2", "3"):
        done = subprocess.run(command, env={"PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True)
        lines.append(done.stdout.split())
    return [set(each) for each in zip(*lines, strict=True)]


def test_equal_values_have_one_fingerprint() -> None:
    several = [value for value, found in zip(EQUAL, _fingerprints(*EQUAL), strict=True) if len(found) > 1]
    assert several == []


def test_different_values_have_different_fingerprints() -> None:
    pairs = zip(DIFFERENT, *(_fingerprints(*side) for side in zip(*DIFFERENT, strict=True)), strict=True)
    assert [values for values, one, another in pairs if one & another] == []
