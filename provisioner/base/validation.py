"""Describes what is wrong with an untrusted value: one bounded line per problem, safe for a terminal.

Never shows a long value whole, and never shows control characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches

from pydantic import ValidationError
from pydantic_core import ErrorDetails

MAXIMUM_LINES = 20
_SHOWN_CHARACTERS = 80
# The keys and indexes that lead to a value.
Location = tuple[int | str, ...]

# Our words for pydantic's error types. Other types keep pydantic's words.
_WORDS = {
    "extra_forbidden": "unknown key",
    "missing": "is required",
    "string_type": "must be a string",
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "bool_type": "must be true or false",
    "model_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "float_parsing": "must be a number, without a unit",
    "finite_number": "must be a finite number",
    "decimal_type": "must be a number",
    "decimal_parsing": "must be a number",
}


def shown(value: object) -> str:
    """Formats a value as one short line for a message, with control characters escaped.

    Args:
        value: any value. Containers are only counted, since they may be huge or contain themselves.
    """
    if isinstance(value, str):
        cut = value if len(value) <= _SHOWN_CHARACTERS else value[:_SHOWN_CHARACTERS] + "..."
        return repr(cut)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return "a huge number" if isinstance(value, int) and value.bit_length() > 64 else repr(value)
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return f"a mapping of {len(value)}" if isinstance(value, dict) else type(value).__name__


def dotted(location: Location) -> str:
    """Formats a path: each key bare if it is plain, otherwise quoted, since keys are untrusted too."""
    return ".".join(map(_part, location)) or "the document"


def lines_of(
    error: ValidationError,
    known: Callable[[Location], Iterable[str]] = lambda _: (),
    place: Callable[[Location], str] = dotted,
) -> list[str]:
    """Returns pydantic's findings as lines of the form `dotted.path: problem`.

    Args:
        error: pydantic's error.
        known: returns the keys allowed at a path; a similar one is suggested for an unknown key.
        place: formats a path.
    """
    lines = []
    for finding in error.errors(include_url=False):
        if finding["type"] == "too_short" and len(finding["input"]) >= finding["ctx"]["min_length"]:
            continue  # long enough: pydantic left invalid items out of the count
        line = f"{place(finding['loc'])}: {_problem(finding)}"
        if finding["type"] == "extra_forbidden":
            key, keys = str(finding["loc"][-1])[:_SHOWN_CHARACTERS], list(known(finding["loc"]))
            alike = get_close_matches(key, keys, n=1) or [candidate for candidate in keys if candidate.startswith(key)]
            line += f"; perhaps {alike[0]}?" if alike else ""
        lines.append(line)
    return lines


def listed(lines: Iterable[str]) -> str:
    """Formats lines as an indented list below a message; lines beyond MAXIMUM_LINES are only counted."""
    items = list(lines)
    more = [f"and {len(items) - MAXIMUM_LINES} more"] if len(items) > MAXIMUM_LINES else []
    return "".join(f"\n  - {line}" for line in items[:MAXIMUM_LINES] + more)


def _problem(finding: ErrorDetails) -> str:
    kind = finding["type"]
    if kind == "value_error":
        return str(finding["ctx"]["error"])
    if kind == "too_short":
        return f"must have at least {finding['ctx']['min_length']}"
    words = _WORDS.get(kind) or finding["msg"].replace("Input should ", "must ", 1)
    if kind in ("missing", "extra_forbidden"):
        return words
    return f"{words}, not {shown(finding['input'])}"


def _part(part: int | str) -> str:
    text = str(part)
    plain = text.replace("_", "a").replace("-", "a").isalnum() and len(text) <= _SHOWN_CHARACTERS
    return text if plain else shown(text)
