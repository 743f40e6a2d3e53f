"""Renders results, errors and progress. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from provisioner.cli.streams import silence, stderr
from provisioner.errors import HostError, ProvisionerError

SCHEMA = 1
TRANSIENT_PHASES = ("images",)


@dataclass(frozen=True)
class Result:
    """The result of a command.

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
        _write(_printable_lines(result.text) if out.isatty() else result.text, out)


def _write(text: str, out: TextIO) -> None:
    """Writes text and flushes it, since an error while Python exits would be neither reported nor in the exit code."""
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


def render_error(error: ProvisionerError, *, as_json: bool) -> None:
    """Prints an error and its hint on stderr, and with --json also one object on stdout."""
    if as_json:
        said = {"kind": type(error).__name__, "message": error.message, "details": error.details, "hint": error.hint}
        result = Result({"error": {**said, "exit_code": error.exit_code}}, exit_code=error.exit_code)
        with contextlib.suppress(HostError, BrokenPipeError):  # stderr has the error anyway
            render(result, as_json=True)
    console = _console()
    console.print(f"[bold red]error:[/] {escape(_printable_lines(error.message))}")
    if error.details:
        console.print(f"[dim]{escape(_indented(error.details))}[/]")
    if error.hint:
        console.print(f"[bold]hint:[/] {escape(_printable_lines(error.hint))}")


def _console() -> Console:
    return Console(file=stderr(), highlight=False, soft_wrap=True)


def _indented(text: str) -> str:
    return "\n".join(f"  {printable(line)}" for line in text.strip().splitlines()[-25:])


@dataclass
class TerminalProgress:
    """Shows progress to people: with a spinner on a terminal, otherwise as plain lines.

    Args:
        console: a console on stderr.
    """

    console: Console = field(default_factory=_console)
    _begin: float = field(default_factory=time.monotonic)
    _phase: str = ""
    _status: Status | None = None
    _half_line: str = ""
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def phase_started(self, name: str) -> None:
        """Shows that a phase is running."""
        with self._lock:
            self._phase = name
            if self.console.is_terminal:
                self.stop()
                self._status = self.console.status(escape(name))
                self._status.start()

    def phase_finished(self, name: str, seconds: float) -> None:
        """Shows how long a phase took."""
        with self._lock:
            self.stop()
            self._flush()
            self._phase = ""
            self._line(f"[green]done[/] {escape(name)} [dim]({seconds:.1f} s)[/]")

    def note(self, text: str) -> None:
        """Shows a line of text."""
        with self._lock:
            self._flush()
            self._line(escape(text))

    def output(self, text: str) -> None:
        """Shows a machine's output line by line; on a terminal, only the last line while images are built."""
        with self._lock:
            *lines, self._half_line = (self._half_line + text).split("\n")
            if self._phase in TRANSIENT_PHASES:
                if self._status and lines:
                    self._status.update(f"{self._phase} [dim]{escape(printable(lines[-1])[:100])}[/]")
                return
            for line in lines:
                self.console.print(f"[dim]  | {escape(printable(line))}[/]")

    def stop(self) -> None:
        """Removes the spinner from the terminal."""
        if self._status:
            self._status.stop()
            self._status = None

    def _flush(self) -> None:
        half, self._half_line = self._half_line, ""
        if half and self._phase not in TRANSIENT_PHASES:
            self.console.print(f"[dim]  | {escape(printable(half))}[/]")

    def _line(self, text: str) -> None:
        self.console.print(f"[dim]{time.monotonic() - self._begin:6.1f}s[/] {text}")


def printable(line: str) -> str:
    """Removes control characters from an untrusted line, which could otherwise control the operator's terminal."""
    return "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in line.rstrip("\r"))


def _printable_lines(text: str) -> str:
    return "\n".join(printable(line) for line in text.splitlines())


def table(headings: list[str], rows: list[list[str]]) -> str:
    """Formats a plain table whose columns fit their contents."""
    cells = [headings, *[[printable(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)
