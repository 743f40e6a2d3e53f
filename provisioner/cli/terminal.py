"""Shows progress and errors to people, on stderr. Takes long to import, so callers import it on first use."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from provisioner.cli.output import Result, printable, printable_lines, render
from provisioner.cli.streams import stderr
from provisioner.errors import HostError, ProvisionerError

TRANSIENT_PHASES = ("images",)


def render_error(error: ProvisionerError, *, as_json: bool) -> None:
    """Prints an error and its hint on stderr, and with --json also one object on stdout."""
    if as_json:
        fields = {"kind": type(error).__name__, "message": error.message, "details": error.details, "hint": error.hint}
        result = Result({"error": {**fields, "exit_code": error.exit_code}}, exit_code=error.exit_code)
        with contextlib.suppress(HostError, BrokenPipeError):  # stderr has the error anyway
            render(result, as_json=True)
    console = _console()
    console.print(f"[bold red]error:[/] {escape(printable_lines(error.message))}")
    if error.details:
        console.print(f"[dim]{escape(_indented(error.details))}[/]")
    if error.hint:
        console.print(f"[bold]hint:[/] {escape(printable_lines(error.hint))}")


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
