"""Shows progress and errors to people, on stderr. Takes long to import, so callers import it on first use."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.status import Status
from rich.text import Text

from provisioner.base.errors import HostError, Interrupted, ProvisionerError
from provisioner.base.printable import CUT, printable, printable_lines
from provisioner.cli.output import Result, render, stderr

# How many lines of an error's details are shown: about one screen.
DETAIL_LINES = 25
TRANSIENT_PHASES = ("images",)
# A machine's line that is longer is shown in pieces, and never collected whole.
MAXIMUM_LINE_CHARACTERS = 10_000
# How much of a line fits beside the spinner.
SPINNER_CHARACTERS = 100
# How often a phase says that it is still running, where there is no spinner.
SIGN_OF_LIFE_SECONDS = 30.0


def hint_of(error: ProvisionerError) -> str | None:
    """Returns what to do next, with the options that it is done by."""
    options = ", ".join(f"--{setting.replace('_', '-')}" for setting in error.settings)
    return " ".join(filter(None, (error.hint, options and f"Options: {options}."))) or None


def render_error(error: ProvisionerError, *, as_json: bool) -> None:
    """Prints an error and its hint on stderr, and with --json also one object on stdout."""
    hint = hint_of(error)
    if as_json:
        fields = {"kind": type(error).__name__, "message": error.message, "details": error.details, "hint": hint}
        result = Result({"error": {**fields, "exit_code": error.exit_code}}, exit_code=error.exit_code)
        with contextlib.suppress(HostError, BrokenPipeError):  # stderr has the error anyway
            render(result, as_json=True)
    console = _console()
    # A command that the operator ended has not failed.
    label = Text() if isinstance(error, Interrupted) else Text.assemble(("error:", "bold red"), " ")
    console.print(label.append(printable_lines(error.message)))
    if error.details:
        console.print(Text(_indented(error.details), "dim"))
    if hint:
        console.print(Text.assemble(("hint:", "bold"), " ", printable_lines(hint)))


def _console() -> Console:
    return Console(file=stderr(), highlight=False, soft_wrap=True)


def _indented(text: str) -> str:
    lines = text.strip().splitlines()
    cut = [CUT.strip()] if len(lines) > DETAIL_LINES else []
    return "\n".join(f"  {printable(line)}" for line in [*cut, *lines[-DETAIL_LINES:]])


@dataclass
class TerminalProgress:
    """Shows progress to people: with a spinner on a terminal, otherwise as plain lines.

    Every text may come from a machine: it is made printable, and never parsed as Rich's markup.

    Args:
        console: a console on stderr.
    """

    console: Console = field(default_factory=_console)
    _begin: float = field(default_factory=time.monotonic)
    _phase: str = ""
    _status: Status | None = None
    _half_line: str = ""
    _last_line: str = ""
    _ended: threading.Event = field(default_factory=threading.Event)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def phase_started(self, name: str) -> None:
        """Shows that a phase is running."""
        with self._lock:
            self.stop()
            self._flush()  # a phase that failed was not finished
            self._phase, self._last_line = name, ""
            if self.console.is_terminal:
                self._status = self.console.status(Text(printable(name)))
                self._status.start()
            else:
                self._line(f"{printable(name)} ...")
                self._ended = threading.Event()
                threading.Thread(target=self._give_signs_of_life, args=(name, self._ended), daemon=True).start()

    def phase_finished(self, name: str, seconds: float) -> None:
        """Shows how long a phase took."""
        with self._lock:
            self.stop()
            self._flush()
            self._phase = ""
            self._line(("done", "green"), f" {printable(name)} ", (f"({seconds:.1f} s)", "dim"))

    def note(self, text: str) -> None:
        """Shows a line of text."""
        with self._lock:
            self._flush()
            # What was shown belongs to what came before, such as another image.
            self._last_line = printable(text)[:SPINNER_CHARACTERS] if self._phase in TRANSIENT_PHASES else ""
            if self._status:
                self._status.update(Text(printable(self._phase)))
            self._line(printable(text))

    def output(self, text: str) -> None:
        """Shows a machine's output line by line; on a terminal, only the last line while images are built."""
        with self._lock:
            *lines, self._half_line = (self._half_line + text).split("\n")
            if len(self._half_line) > MAXIMUM_LINE_CHARACTERS:
                lines.append(self._half_line)
                self._half_line = ""
            if self._phase in TRANSIENT_PHASES:
                if lines:
                    self._last_line = printable(lines[-1])[:SPINNER_CHARACTERS]
                if self._status and lines:
                    self._status.update(Text.assemble(printable(self._phase), " ", (self._last_line, "dim")))
                return
            for line in lines:
                self._output_line(line)

    def stop(self) -> None:
        """Removes the spinner from the terminal, and ends the signs of life elsewhere."""
        self._ended.set()
        if self._status:
            self._status.stop()
            self._status = None

    def _give_signs_of_life(self, name: str, ended: threading.Event) -> None:
        begin = time.monotonic()
        while not ended.wait(SIGN_OF_LIFE_SECONDS):
            with self._lock:
                if not ended.is_set():
                    seconds = time.monotonic() - begin
                    last_line = f" {self._last_line}" if self._last_line else ""
                    self._line(f"{printable(name)}: still running ({seconds:.0f} s)", (last_line, "dim"))

    def _flush(self) -> None:
        half, self._half_line = self._half_line, ""
        if half and self._phase not in TRANSIENT_PHASES:
            self._output_line(half)

    def _output_line(self, line: str) -> None:
        self.console.print(Text(f"  | {printable(line)}", "dim"))

    def _line(self, *parts: str | tuple[str, str]) -> None:
        self.console.print(Text.assemble((f"{time.monotonic() - self._begin:6.1f}s", "dim"), " ", *parts))
