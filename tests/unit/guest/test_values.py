"""Tests how the helper converts the values that a family returns."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from tests.unit.guest.machine_directory import GUEST, Machine


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("0.5", 0.5),
        ("-3", -3),
        ("None", None),
        ("True", True),
        ("'1.0'", "1.0"),
        ("[1, (2, 3)]", [1, [2, 3]]),
        ("{1: {'a': None}}", {"1": {"a": None}}),
        ("float('inf')", math.inf),
        ("__import__('decimal').Decimal('0.25')", 0.25),
        ("__import__('fractions').Fraction(1, 4)", 0.25),
        ("b'bytes'", "b'bytes'"),
        ("object", "<class 'object'>"),
    ],
)
def test_a_score_comes_back_as_it_is(machine: Machine, expression: str, value: object) -> None:
    answer = machine.score(f"return {expression}")

    assert answer.value == value
    assert type(answer.value) is type(value)


def test_nan_comes_back_as_nan(machine: Machine) -> None:
    assert math.isnan(machine.score("return float('nan')").value)


def test_numpy_and_pandas_values_become_lists_and_numbers(machine: Machine) -> None:
    expected = {
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

    values = machine.score(f"return [{', '.join(expected)}]", before="import numpy, pandas\n").value

    assert isinstance(values, list)
    # As JSON, since 1, 1.0 and True are equal.
    assert json.dumps(dict(zip(expected, values, strict=True))) == json.dumps(expected)


def test_a_value_that_cannot_be_encoded_becomes_its_repr(machine: Machine) -> None:
    before = """
        class Odd:
            def __repr__(self):
                raise RuntimeError("no")
    """

    assert machine.score("return [object, Odd(), {1}]", before=before).value == [
        "<class 'object'>",
        "<Odd without a repr>",
        "{1}",
    ]


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


def _fingerprints(expression: str) -> set[str]:
    code = f"{CLASSES}\nprint(fingerprint({expression}))"
    return {
        subprocess.run(
            [sys.executable, "-B", "-c", code, str(GUEST)],
            env={"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout.decode()
        for seed in ("1", "2", "3")
    }


@pytest.mark.parametrize(
    "expression",
    [
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
    ],
    ids=["set", "dataclass", "slots", "object", "key", "types", "keys", "sets", "objects", "deque", "others"],
)
def test_equal_values_have_one_fingerprint(expression: str) -> None:
    assert len(_fingerprints(expression)) == 1


@pytest.mark.parametrize(
    ("expression", "another"),
    [
        ("Fields({1})", "Fields({2})"),
        ("Slots([1])", "Slots([2])"),
        ("Plain(1)", "Fields(1)"),
        ("{frozenset({1}): 1}", "{frozenset({2}): 1}"),
        ("{1: 2}", "{'1': 2}"),
        ("b'a' * 20_000", "b'a' * 20_001"),
        ("pathlib.Path('/a')", "pathlib.Path('/b')"),
        ("datetime.date(2026, 1, 1)", "datetime.date(2026, 1, 2)"),
        ("[len, function]", "[print, function]"),
    ],
    ids=["dataclass", "slots", "type", "set key", "key", "bytes", "path", "date", "function"],
)
def test_different_values_have_different_fingerprints(expression: str, another: str) -> None:
    assert not _fingerprints(expression) & _fingerprints(another)
