"""Defines the listener to which long work reports, and runs what may fail without harm, such as keeping logs.

A failure of such work never prevents a destruction or another ending: an error, whatever it is, becomes one bounded
line for the operator. Only KeyboardInterrupt passes: during a clean-up the operator insists on leaving at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from provisioner.base.errors import ProvisionerError
from provisioner.base.printable import beginning

# A line that begins so, of a program that Terraform runs for us, is a note to the listener.
NOTE_OF_A_PROGRAM = "provisioner: "


class Progress(Protocol):
    """A listener to phases, notes and output. It is called from several threads."""

    def phase_started(self, name: str) -> None:
        """Reports that a phase begins."""

    def phase_finished(self, name: str, seconds: float) -> None:
        """Reports that a phase succeeded, and how long it took."""

    def note(self, text: str) -> None:
        """Reports one line of text."""

    def output(self, text: str) -> None:
        """Reports a piece of a machine's output, from which secrets are already redacted."""


class Silence:
    """A listener that ignores everything."""

    def phase_started(self, name: str) -> None:
        """Ignores it."""

    def phase_finished(self, name: str, seconds: float) -> None:
        """Ignores it."""

    def note(self, text: str) -> None:
        """Ignores it."""

    def output(self, text: str) -> None:
        """Ignores it."""


class Steady:
    """Passes everything on to another listener and drops that listener's errors, which must not stop the work.

    Args:
        progress: the other listener.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def phase_started(self, name: str) -> None:
        """Passes it on."""
        with contextlib.suppress(Exception):
            self._progress.phase_started(name)

    def phase_finished(self, name: str, seconds: float) -> None:
        """Passes it on."""
        with contextlib.suppress(Exception):
            self._progress.phase_finished(name, seconds)

    def note(self, text: str) -> None:
        """Passes it on."""
        with contextlib.suppress(Exception):
            self._progress.note(text)

    def output(self, text: str) -> None:
        """Passes it on."""
        with contextlib.suppress(Exception):
            self._progress.output(text)


LINE_CHARACTERS = 300
# What does not stop a destruction: everything but KeyboardInterrupt.
SURVIVABLE = (Exception, SystemExit, GeneratorExit)


@contextlib.contextmanager
def best_effort(progress: Progress, what: str) -> Iterator[None]:
    """Runs the body, and reports an error in it instead of raising it.

    Args:
        what: what the body does, for the note.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _note(progress, what, error)


def best_effort_within(progress: Progress, what: str, limit_seconds: float, work: Callable[[], object]) -> None:
    """Does some work in a thread of its own; continues without it after an error, or when its time is up.

    Args:
        what: what the work is, for the note.
        limit_seconds: how long it may take. After that, the thread runs until its own time limits end it.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    with best_effort(progress, what):
        thread = threading.Thread(target=run, name=what, daemon=True)
        thread.start()
        thread.join(limit_seconds)
        if thread.is_alive():
            raise TimeoutError(f"it did not end within {limit_seconds:g} seconds")
        for error in errors:
            _note(progress, what, error)


def describe(error: BaseException) -> str:
    """Returns one bounded line about an error; never raises."""
    try:
        if isinstance(error, KeyboardInterrupt):
            number = error.args[0] if error.args else "SIGINT"
            return "interrupted by Ctrl-C" if number == "SIGINT" else f"ended by {beginning(str(number), 20)}"
        said = error.message if isinstance(error, ProvisionerError) else f"{type(error).__name__} {error}"
        return beginning(" ".join(said.split()), LINE_CHARACTERS)
    except Exception:
        return type(error).__name__


def _note(progress: Progress, what: str, error: BaseException) -> None:
    with contextlib.suppress(Exception):
        progress.note(f"{what}: {describe(error)}")
