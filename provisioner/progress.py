"""What long work tells whoever watches. The library is silent unless it is given a listener."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told of phases as they begin and end. Called from several threads."""

    def phase_started(self, name: str) -> None:
        """A phase begins."""

    def phase_finished(self, name: str, seconds: float) -> None:
        """A phase ended well after so many seconds."""

    def note(self, text: str) -> None:
        """One line worth knowing."""

    def output(self, text: str) -> None:
        """A piece of a machine's output, already free of secrets."""


class Silence:
    """Listens to nothing."""

    def phase_started(self, name: str) -> None:
        """Ignores it."""

    def phase_finished(self, name: str, seconds: float) -> None:
        """Ignores it."""

    def note(self, text: str) -> None:
        """Ignores it."""

    def output(self, text: str) -> None:
        """Ignores it."""
