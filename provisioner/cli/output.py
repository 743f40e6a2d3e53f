"""Renders a command's result as text or JSON on stdout, both safe to print and to parse."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO, cast

from provisioner.base.errors import HostError
from provisioner.base.printable import beginning, printable, printable_lines

if TYPE_CHECKING:
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
    """

    data: dict[str, Any]
    text: str = ""
    exit_code: int = 0


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


def prepare() -> None:
    """Opens stdin, stdout and stderr if the caller closed them, and escapes characters that their encodings lack.

    Otherwise the next file to be opened would get a closed one's descriptor, and output would go into that file.
    """
    _plug()
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure:
        reconfigure(errors="backslashreplace")


def silence(stream: TextIO) -> None:
    """Discards everything that is written to the stream from now on, for a closed pipe or a full disk.

    Also discards buffered output, about which Python would otherwise complain when it exits.
    """
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


class SteadyStderr(io.TextIOBase):
    """Writes to the current sys.stderr. Ignores errors, which must not stop a clean-up."""

    @property
    def _stream(self) -> TextIO | None:
        # While a spinner runs, sys.stderr is Rich's proxy, which would call this again. None: closed from the start.
        return cast(TextIO | None, getattr(sys.stderr, "rich_proxied_file", sys.stderr))

    def write(self, text: str) -> int:
        """Writes the text, or drops it after an error."""
        if stream := self._stream:
            try:
                stream.write(text)
                stream.flush()
            except RuntimeError:
                # A signal handler writes while a line is being written. Python's buffer is not reentrant, and the
                # handler must not raise in the middle of a clean-up.
                with contextlib.suppress(OSError):
                    os.write(stream.fileno(), text.encode(errors="backslashreplace"))
            except OSError:  # a pipe without a reader, a terminal that hung up, a full disk
                with contextlib.suppress(OSError):
                    silence(stream)
        return len(text)

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return bool(self._stream and self._stream.isatty())

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Its encoding, which determines the characters that progress is drawn with."""
        return self._stream.encoding if self._stream else "utf-8"


def stderr() -> TextIO:
    """Returns the stream for progress, errors and tracebacks."""
    return cast(TextIO, SteadyStderr())


def _plug() -> None:
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _nowhere() -> TextIO:
    return open(os.devnull, "w")  # noqa: PTH123 - stays open as long as the process lives
