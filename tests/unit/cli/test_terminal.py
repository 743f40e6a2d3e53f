"""Tests what progress looks like on a terminal and in a pipe."""

from __future__ import annotations

import io
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from provisioner.cli import terminal
from provisioner.cli.terminal import TerminalProgress
from tests.waiting import BOUND_SECONDS, until


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, highlight=False, soft_wrap=True, color_system=None)


def said_by(shown: Console) -> str:
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


class Steps(threading.Event):
    """An event in whose waits time passes only when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = threading.Semaphore(0)

    def set(self) -> None:
        super().set()
        self.steps.release()

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout == terminal.SIGN_OF_LIFE_SECONDS
        self.steps.acquire(timeout=BOUND_SECONDS)
        return self.is_set()


def test_a_phase_in_a_pipe_reports_start_and_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def thread(**about: Any) -> threading.Thread:
        threads.append(threading.Thread(**about))
        return threads[-1]

    monkeypatch.setattr(terminal, "threading", SimpleNamespace(Event=Steps, Thread=thread))
    shown = console(terminal=False)
    progress = TerminalProgress(shown)
    progress.phase_started("images")
    assert said_by(shown).endswith(" images ...\n")
    progress.output("step 7\x1b[2J\n")
    assert isinstance(progress._ended, Steps)
    progress._ended.steps.release()
    until(lambda: "step 7" in said_by(shown))
    assert re.search(r" images: still running \(\d+ s\) step 7\n", said_by(shown))
    progress.note("build step 8")
    progress._ended.steps.release()
    until(lambda: ") build step 8" in said_by(shown))
    progress.phase_finished("images", 1.0)
    ended = said_by(shown)
    [signs_of_life] = threads
    signs_of_life.join(BOUND_SECONDS)
    assert not signs_of_life.is_alive()
    assert said_by(shown) == ended


def test_the_spinner_does_not_show_the_line_of_the_image_before() -> None:
    shown = console(terminal=True)
    progress = TerminalProgress(shown)
    progress.phase_started("images")
    progress.output("the first image's last line\n")
    progress.note("Building the second image")
    assert progress._status
    assert str(progress._status.status) == "images"
    progress.stop()


def test_the_half_line_of_a_phase_that_failed_is_its_own() -> None:
    shown = console(terminal=False)
    progress = TerminalProgress(shown)
    progress.phase_started("start")
    progress.output("half of start")
    progress.phase_started("agent")
    progress.output("first of agent\n")
    progress.stop()
    assert re.findall(r"\| (.*)", said_by(shown)) == ["half of start", "first of agent"]
