"""The library says nothing unless it is given a listener."""

from __future__ import annotations

import threading

import pytest

from provisioner.base.errors import TaskError
from provisioner.base.progress import (
    LINE_CHARACTERS,
    Progress,
    Silence,
    Steady,
    best_effort,
    best_effort_within,
    describe,
)
from tests.unit.fakes.world import Told


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


class Nameless(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "error",
    [OSError(28, "full"), MemoryError(), RecursionError(), SystemExit(3), Nameless(), TaskError("a\nb")],
    ids=["disk", "memory", "recursion", "exit", "nameless", "task"],
)
def test_an_error_becomes_one_line(error: BaseException) -> None:
    told = Told()
    with best_effort(told, "Keeping it"):
        raise error
    [note] = told.notes
    assert note.startswith("Keeping it: ")
    assert "\n" not in note


def test_a_second_interrupt_ends_best_effort_work() -> None:
    with pytest.raises(KeyboardInterrupt), best_effort(Silence(), "Keeping it"):
        raise KeyboardInterrupt


def test_work_that_does_not_end_is_left_behind() -> None:
    told, release = Told(), threading.Event()
    best_effort_within(told, "teardown", 0.05, release.wait)
    assert told.notes == ["teardown: TimeoutError it did not end within 0.05 seconds"]
    release.set()


def test_an_error_in_a_thread_is_told_whatever_its_kind() -> None:
    told = Told()

    def interrupted() -> None:
        raise KeyboardInterrupt

    best_effort_within(told, "teardown", 5, interrupted)
    assert told.notes == ["teardown: interrupted by Ctrl-C"]


def test_a_host_without_threads_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    told = Told()
    best_effort_within(told, "teardown", 5, lambda: None)
    assert told.notes == ["teardown: RuntimeError can't start new thread"]


def test_an_error_is_described_in_a_bounded_line() -> None:
    assert describe(ValueError("x\n" * 9999)).startswith("ValueError x x")
    assert len(describe(ValueError("x" * 9999))) == LINE_CHARACTERS
