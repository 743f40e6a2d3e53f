"""What is said about a stranger's value: short, whole and safe for a terminal."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from provisioner.base.validation import MAXIMUM_LINES, lines_of, listed, shown


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    count: int = 1
    names: list[str] = Field(default=["a"], min_length=1)

    @field_validator("count")
    @classmethod
    def _is_small(cls, value: int) -> int:
        if value > 9:
            raise ValueError("is too large")
        return value


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    inner: Inner
    flag: bool = False
    inners: dict[str, Inner] = {}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "'a'"),
        ("a\x1b[2J\n", r"'a\x1b[2J\n'"),
        ("x" * 81, repr("x" * 80 + "...")),
        (None, "null"),
        (True, "true"),
        (1, "1"),
        (0.5, "0.5"),
        (1 << 64, "a huge number"),
        ([1, 2], "a list of 2"),
        ((), "a list of 0"),
        ({"a": 1}, "a mapping of 1"),
        (b"x", "bytes"),
        (float("nan"), "nan"),
    ],
    ids=["text", "escape", "long", "null", "true", "int", "float", "huge", "list", "tuple", "mapping", "bytes", "nan"],
)
def test_a_value_is_shown_as(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_list_that_contains_itself_is_shown() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert shown(endless) == "a list of 1"


def lines(value: object, **arguments: Any) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(value)
    return lines_of(caught.value, **arguments)


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ({}, "inner: is required"),
        ([], "the document: must be a mapping, not a list of 0"),
        ({"inner": {}, "flag": "no"}, "flag: must be true or false, not 'no'"),
        ({"inner": {"count": "1"}}, "inner.count: must be a whole number, not '1'"),
        ({"inner": {"count": 10}}, "inner.count: is too large"),
        ({"inner": {"names": []}}, "inner.names: must have at least 1"),
        ({"inner": {"names": [3]}}, "inner.names.0: must be a string, not 3"),
        ({"inner": {"names": "a"}}, "inner.names: must be a list, not 'a'"),
        ({"inner": 1}, "inner: must be a mapping, not 1"),
        ({"inner": {}, "inners": {"a b": 1}}, "inners.'a b': must be a mapping, not 1"),
        ({"inner": {}, "\x1b": 1}, r"'\x1b': unknown key"),
    ],
    ids=["missing", "root", "flag", "number", "validator", "short", "item", "list", "mapping", "quoted", "escape"],
)
def test_a_finding_is_one_line(value: object, line: str) -> None:
    assert lines(value) == [line]


def test_each_finding_has_its_own_line() -> None:
    assert lines({"inner": {"count": "1", "names": []}, "flag": 1, "x": 1}) == [
        "inner.count: must be a whole number, not '1'",
        "inner.names: must have at least 1",
        "flag: must be true or false, not 1",
        "x: unknown key",
    ]


@pytest.mark.parametrize(
    ("key", "alike"),
    [("flga", "; perhaps flag?"), ("in", "; perhaps inner?"), ("zzz", "")],
    ids=["mistyped", "cut", "strange"],
)
def test_a_key_that_is_alike_is_named(key: str, alike: str) -> None:
    assert lines({"inner": {}, key: 1}, known=lambda _: Outer.model_fields) == [f"{key}: unknown key{alike}"]


@pytest.mark.parametrize("count", [0, 1, MAXIMUM_LINES, MAXIMUM_LINES + 1, 1000], ids=str)
def test_a_long_list_is_cut_and_counted(count: int) -> None:
    rows = listed(f"line {number}" for number in range(count)).split("\n  - ")[1:]
    assert rows[:MAXIMUM_LINES] == [f"line {number}" for number in range(min(count, MAXIMUM_LINES))]
    assert rows[MAXIMUM_LINES:] == ([f"and {count - MAXIMUM_LINES} more"] if count > MAXIMUM_LINES else [])
