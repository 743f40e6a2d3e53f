"""Renders a command's result as text or JSON on stdout, and makes untrusted text safe to print."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from typing import Any, TextIO

from provisioner.cli.streams import silence
from provisioner.errors import HostError

SCHEMA = 1


@dataclass(frozen=True)
class Result:
    """Holds the result of a command.

    Args:
        data: the result for programs; printed with --json, together with `schema` and `ok`.
        text: the result for people; an empty text prints nothing.
        exit_code: the exit code of the process.
    """

    data: dict[str, Any]
    text: str = ""
    exit_code: int = 0


def render(result: Result, *, as_json: bool, out: TextIO | None = None) -> None:
    """Prints a result: text, or one JSON object.

    Raises:
        BrokenPipeError: the reader has closed the pipe.
        HostError: the output could not be written.
    """
    out = out or sys.stdout
    if as_json:
        data = _strict({"schema": SCHEMA, "ok": result.exit_code == 0, **result.data})
        _write(json.dumps(data, indent=2, default=str, allow_nan=False), out)
    elif result.text:
        _write(printable_lines(result.text) if out.isatty() else result.text, out)


def _write(text: str, out: TextIO) -> None:
    """Writes text and flushes it: an error while Python exits would neither be reported nor change the exit code."""
    try:
        print(text, file=out, flush=True)
    except OSError as error:
        silence(out)
        if isinstance(error, BrokenPipeError):
            raise
        raise unwritable(error) from error


def unwritable(error: OSError) -> HostError:
    """Returns the error for output that could not be written."""
    return HostError(f"The output could not be written: {error.strerror}.")


def _strict(value: Any) -> Any:
    """Replaces NaN and infinities, which JSON does not have, by null. An invalid submission's score is NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value


def printable(line: str) -> str:
    """Removes control characters from an untrusted line, which could otherwise control the operator's terminal."""
    return "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in line.rstrip("\r"))


def printable_lines(text: str) -> str:
    """Returns the text with each line made printable."""
    return "\n".join(printable(line) for line in text.splitlines())


def table(headings: list[str], rows: list[list[str]]) -> str:
    """Formats a plain table whose columns fit their contents."""
    cells = [headings, *[[printable(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)
