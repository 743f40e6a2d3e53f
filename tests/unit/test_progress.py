"""The library says nothing unless it is given a listener."""

from __future__ import annotations

import pytest

from provisioner.progress import Progress, Silence, Steady


def test_progress_needs_no_listener(capfd: pytest.CaptureFixture[str]) -> None:
    silence: Progress = Silence()
    silence.phase_started("one")
    silence.note("a note")
    silence.output("a line")
    silence.phase_finished("one", 1.5)
    assert capfd.readouterr() == ("", "")


class Broken:
    """A listener that hears everything, and fails."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def phase_started(self, name: str) -> None:
        self.note(name)

    def phase_finished(self, name: str, seconds: float) -> None:
        self.note(f"{name} {seconds}")

    def note(self, text: str) -> None:
        self.heard.append(text)
        raise BrokenPipeError

    def output(self, text: str) -> None:
        self.note(text)


def test_a_listener_that_fails_stops_nothing() -> None:
    broken = Broken()
    steady: Progress = Steady(broken)
    steady.phase_started("one")
    steady.note("a note")
    steady.output("a line")
    steady.phase_finished("one", 1.5)
    assert broken.heard == ["one", "a note", "a line", "one 1.5"]
