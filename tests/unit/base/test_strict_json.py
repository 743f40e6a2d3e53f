"""JSON from outside: what it says, and what is refused before it becomes objects."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest
from pydantic import ValidationError

from provisioner.base.models import ScoreLogEntry
from provisioner.base.strict_json import NotStrictJsonError, load, load_record, parse


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{"a": [1, 2.5, "x,[{", null, true], "b": {"a": 1}}', {"a": [1, 2.5, "x,[{", None, True], "b": {"a": 1}}),
        (b'"\\ud83d\\ude00 \xc3\xa4 \\\\ud800 \\""', '\N{GRINNING FACE} ä \\ud800 "'),
        (b"[" * 100 + b"]" * 100, None),
        (b"-" + b"9" * 4299, -(10**4299) + 1),
        (b'["' + b"\\\\" * 1000 + b'"]', ["\\" * 1000]),
    ],
    ids=["all", "text", "deep", "long", "escapes"],
)
def test_a_text_says(text: bytes, value: object) -> None:
    assert value is None or parse(text) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "not JSON"),
        (b'{"a": 1} x', "not JSON"),
        (b'["a', "not JSON"),
        (b'["\\', "not JSON"),
        (b'"\\ud800', "not JSON"),
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', "a key twice"),
        (b'{"a": 1, "\\u0061": 2}', "a key twice"),
        (b"[NaN]", "NaN is not allowed"),
        (b"[-Infinity]", "-Infinity is not allowed"),
        (b"[1e999]", "too large"),
        (b'"\\ud800"', "surrogate"),
        (b'{"\\udc00": 1}', "surrogate"),
        (b'"\\ude00\\ud83d"', "surrogate"),
        (b"\xed\xa0\x80", "not UTF-8"),
        (b'"\xff"', "not UTF-8"),
        (b"9" * 4301, "4300 digits"),
        (b"[" * 101 + b"]" * 101, "100 deep"),
        (b'{"a":' * 101, "100 deep"),
        (b"[" + b"0," * 1_000_000 + b"0]", "1000000 values"),
        (b"[" + b"0" * (8 << 20) + b"]", "8388608 bytes"),
    ],
    ids=[
        "nothing", "more", "open", "half", "cut", "twice", "disguised", "nan", "infinity", "huge", "lone", "key",
        "reversed", "bytes", "latin", "digits", "lists", "objects", "values", "size",
    ],
)  # fmt: skip
def test_what_is_not_strict_json_is_refused(text: bytes, says: str) -> None:
    with pytest.raises(NotStrictJsonError, match=says):
        parse(text)


def test_constants_are_allowed_where_the_caller_says_so() -> None:
    assert math.isnan(parse(b"NaN", constants=True))
    assert parse(b"[-Infinity, 1e999]", constants=True) == [-math.inf, math.inf]


def test_what_a_text_says_is_checked() -> None:
    assert load(dict[str, int], b'{"a": 1}') == {"a": 1}
    with pytest.raises(ValidationError):
        load(dict[str, int], b'{"a": "x"}')


def test_a_record_comes_back_as_it_was_written() -> None:
    entry = ScoreLogEntry(score=math.nan, details={"x": [1]}, scored_at=datetime.now(UTC), elapsed_seconds=1.5)
    again = load_record(ScoreLogEntry, entry.model_dump_json().encode())
    assert again.model_dump(exclude={"score"}) == entry.model_dump(exclude={"score"})
    assert math.isnan(again.score or 0)
