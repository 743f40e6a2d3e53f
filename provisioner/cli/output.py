"""Renders a command's result as text or JSON on stdout, both safe to print and to parse."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TextIO

from provisioner.base.errors import HostError
from provisioner.base.printable import beginning, printable, printable_lines
from provisioner.cli.streams import silence
from provisioner.ssh.exchange import StreamSize

SCHEMA = 1
# What comes from a machine is bounded where it is read; these bound what programs have to read of us.
MAXIMUM_STRING_CHARACTERS = 16 << 20
MAXIMUM_DEPTH = 100
MAXIMUM_NAMES_CHARACTERS = 2000
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Result:
    """Holds the result of a command.

    Args:
        data: the result for programs; printed with --json, together with `schema` and `ok`.
        text: the result for people; an empty text prints nothing.
        exit_code: the exit code of the process.
        then: work for after the result is printed; prints nothing on stdout, and returns the exit code.
    """

    data: dict[str, Any]
    text: str = ""
    exit_code: int = 0
    then: Callable[[], int] | None = None


def render(result: Result, *, as_json: bool, out: TextIO | None = None) -> None:
    """Prints a result: text without escape sequences and control characters, or one JSON object in ASCII.

    Raises:
        BrokenPipeError: the reader has closed the pipe.
        HostError: the output could not be written.
    """
    out = out or sys.stdout
    if as_json:
        data = _strict({"schema": SCHEMA, "ok": result.exit_code == 0, **result.data})
        _write(json.JSONEncoder(indent=2, default=str, allow_nan=False).iterencode(data), out)
    elif result.text:
        # Made printable for a pipe as well, which mostly ends on a terminal. --json has every character.
        _write([printable_lines(result.text)], out)


def show(text: str) -> None:
    """Prints printable text on stdout at once, and no line's end after it.

    Raises:
        BrokenPipeError, HostError: as for render.
    """
    _write([text], sys.stdout, end="")


def _write(pieces: Iterable[str], out: TextIO, end: str = "\n") -> None:
    """Writes and flushes: an error while Python exits would neither be reported nor change the exit code."""
    try:
        out.writelines(pieces)
        print(end=end, file=out, flush=True)
    except OSError as error:
        silence(out)
        if isinstance(error, BrokenPipeError):
            raise
        raise unwritable(error) from error


def unwritable(error: OSError) -> HostError:
    """Returns the error for output that could not be written."""
    return HostError(f"The output could not be written: {error.strerror}.")


def _strict(value: Any, depth: int = 0) -> Any:
    """Makes a value one that every JSON parser reads.

    NaN and infinities become null (an invalid submission's score is NaN), as do containers beyond MAXIMUM_DEPTH.
    Unpaired surrogates are replaced, and strings are cut at MAXIMUM_STRING_CHARACTERS.
    """
    if isinstance(value, str):
        value = beginning(value, MAXIMUM_STRING_CHARACTERS)
        if not _SURROGATE.search(value):
            return value
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (dict, list, tuple)) and depth >= MAXIMUM_DEPTH:
        return None
    if isinstance(value, dict):
        return {_strict(str(key)): _strict(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item, depth + 1) for item in value]
    return value


def streams(stdout: str, stderr: str, stdout_size: StreamSize, stderr_size: StreamSize) -> dict[str, str | int]:
    """Returns a command's output for programs, and for each stream its size and how much of it was cut out."""
    return {
        "stdout": stdout,
        "stdout_bytes": stdout_size.total_bytes,
        "stdout_cut_bytes": stdout_size.cut_bytes,
        "stderr": stderr,
        "stderr_bytes": stderr_size.total_bytes,
        "stderr_cut_bytes": stderr_size.cut_bytes,
    }


def names_in_line(names: Iterable[str]) -> str:
    """Returns names, which a family may have chosen, as part of a line of bounded length."""
    return beginning(", ".join(names), MAXIMUM_NAMES_CHARACTERS)


def table(headings: list[str], rows: list[list[str]]) -> str:
    """Formats a plain table whose columns fit their contents."""
    cells = [headings, *[[printable(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)
