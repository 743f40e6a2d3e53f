"""Reads JSON that comes from machines, records, clouds and databases: bounded before any object is built, and strictly.

A byte of JSON can cost a hundred bytes of memory, so values are counted in the text first.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter

LIMIT_BYTES = 8 << 20
# Records of our own: control characters in text from a machine take six bytes each in them.
RECORD_LIMIT_BYTES = 64 << 20
# Measured: the worst text of this many, an object with ever new keys, takes 114 MiB.
MAXIMUM_VALUES = 1_000_000
# pydantic writes no record with values that are nested deeper than about 200.
MAXIMUM_DEPTH = 100
# As Python's own int() does, whatever the process was told: its time grows with the square of the digits.
MAXIMUM_DIGITS = 4300

# A whole string. Without backtracking, and unended strings too.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

T = TypeVar("T")


class NotStrictJsonError(ValueError):
    """A text is not JSON, too large, nested too deeply, ambiguous, or holds what no text file can."""


def parse(
    data: bytes,
    *,
    limit_bytes: int = LIMIT_BYTES,
    maximum_values: int = MAXIMUM_VALUES,
    constants: bool = False,
) -> Any:
    """Parses JSON with each key once per object, valid Unicode and finite numbers.

    Args:
        data: the text as UTF-8.
        limit_bytes: the largest size.
        maximum_values: how many lists, objects, keys and further members there may be.
        constants: whether NaN and infinities are allowed.

    Raises:
        NotStrictJsonError: the text is not such JSON, too large, or nested more than 100 deep.
    """
    if len(data) > limit_bytes:
        raise NotStrictJsonError(f"it has more than {limit_bytes} bytes")
    _measure(data, maximum_values)
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=float if constants else _finite,
            parse_constant=float if constants else _refuse_constant,
        )
    except NotStrictJsonError:
        raise
    except UnicodeDecodeError as error:
        raise NotStrictJsonError("it is not UTF-8") from error
    except ValueError as error:
        raise NotStrictJsonError(f"it is not JSON: {error}") from error


def load(kind: type[T], data: bytes) -> T:
    """Parses JSON as `parse` does, and checks what it says.

    Args:
        kind: a model, or any other type that pydantic knows.

    Raises:
        NotStrictJsonError: the text is not such JSON.
        pydantic.ValidationError: it is not a `kind`. This is a ValueError, as the other is.
    """
    return TypeAdapter(kind).validate_python(parse(data))


def load_record(kind: type[T], data: bytes) -> T:
    """Parses and checks a record of our own, which may be larger and hold scores of NaN.

    Raises:
        ValueError: as in `load`.
    """
    return TypeAdapter(kind).validate_python(parse(data, limit_bytes=RECORD_LIMIT_BYTES, constants=True))


def load_file(kind: type[T], path: Path) -> T:
    """Reads a record of our own from a file, of which not more than the limit is read.

    Raises:
        OSError: the file cannot be read.
        ValueError: as in `load`.
    """
    with path.open("rb") as file:
        return load_record(kind, file.read(RECORD_LIMIT_BYTES + 1))


def _measure(data: bytes, maximum_values: int) -> None:
    """Checks depth, number of values and surrogates, without building the values."""
    # With more strings than this, it is refused whatever it holds besides.
    structure, strings = _STRING.subn(b"", data, maximum_values + 2)
    depth = 0
    # JSON with more brackets than this has too many values.
    for bracket in structure.translate(None, _NO_BRACKETS)[: 2 * maximum_values]:
        depth += 1 if bracket in b"[{" else -1
        if depth > MAXIMUM_DEPTH:
            raise NotStrictJsonError(f"it is nested more than {MAXIMUM_DEPTH} deep")
    values = sum(map(structure.count, (b"[", b"{", b",", b":")))
    if values > maximum_values:
        raise NotStrictJsonError(f"it has more than {maximum_values} values")
    if strings > values + 1:  # nothing stands between two strings
        raise NotStrictJsonError("it is not JSON")
    if _SURROGATE.search(data):
        for string in _STRING.finditer(data):
            if _SURROGATE.search(data, *string.span()):
                _require_unicode(string[0])


def _require_unicode(string: bytes) -> None:
    """Checks a string that holds escaped surrogates: they must be pairs, or UTF-8 could not hold it."""
    try:
        json.loads(string).encode("utf-8")
    except UnicodeEncodeError as error:
        raise NotStrictJsonError("it holds half of a surrogate pair") from error
    except ValueError as error:
        raise NotStrictJsonError("it is not JSON") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise NotStrictJsonError("an object has a key twice")
    return result


def _integer(text: str) -> int:
    if len(text) > MAXIMUM_DIGITS:
        raise NotStrictJsonError(f"an integer has more than {MAXIMUM_DIGITS} digits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise NotStrictJsonError("a number is too large")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise NotStrictJsonError(f"{name} is not allowed")
