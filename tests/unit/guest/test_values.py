"""Tests how the helper converts the values that a family returns."""

from __future__ import annotations

import math

import pytest

from tests.unit.guest.machine_directory import Machine


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


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("numpy.float64(0.5)", 0.5),
        ("numpy.float32(0.5)", 0.5),
        ("numpy.longdouble(0.5)", 0.5),
        ("numpy.int64(3)", 3),
        ("numpy.bool_(True)", True),
        ("numpy.array([[1, 2], [3, 4]])", [[1, 2], [3, 4]]),
        ("{numpy.int64(1): numpy.arange(2)}", {"1": [0, 1]}),
        ("pandas.Series([1.5, 2.5])", [1.5, 2.5]),
        ("pandas.DataFrame({'a': [1, 2]})", [{"a": 1}, {"a": 2}]),
        ("pandas.NA", "<NA>"),
    ],
)
def test_numpy_and_pandas_values_become_lists_and_numbers(machine: Machine, expression: str, value: object) -> None:
    answer = machine.score(f"return {expression}", before="import numpy, pandas\n")

    assert answer.value == value
    assert type(answer.value) is type(value)


def test_what_cannot_be_encoded_becomes_its_repr_even_where_that_breaks(machine: Machine) -> None:
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
    ["return 'x' * 9_000_000", "return '\\u00e9' * 3_000_000", "a = []\nfor _ in range(50): a = [a, a]\nreturn a"],
)
def test_a_value_that_is_too_large_is_an_error_of_its_own(machine: Machine, body: str) -> None:
    assert machine.score(body).result["kind"] == "too_large"
