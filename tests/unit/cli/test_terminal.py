"""Tests what progress looks like on a terminal and in a pipe."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from provisioner.cli import terminal
from provisioner.cli.terminal import TerminalProgress


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, highlight=False, soft_wrap=True, color_system=None)


def said_by(shown: Console) -> str:
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


def test_a_phase_in_a_pipe_says_that_it_begins_and_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "SIGN_OF_LIFE_SECONDS", 0.01)
    shown = console(terminal=False)
    progress = TerminalProgress(shown)
    progress.phase_started("images")
    assert said_by(shown).endswith(" images ...\n")
    progress.output("step 7\x1b[2J\n")
    deadline = time.monotonic() + 30
    while "step 7" not in said_by(shown) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert re.search(r" images goes on \(\d+ s\) step 7\n", said_by(shown))
    progress.phase_finished("images", 1.0)
    ended = said_by(shown)
    time.sleep(0.05)
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
