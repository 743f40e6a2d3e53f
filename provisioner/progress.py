"""Defines the listener to which long work reports. Without one the library is silent."""

from __future__ import annotations

import contextlib
from typing import Protocol

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
