"""The library says nothing unless it is given a listener."""

from __future__ import annotations

import pytest

from provisioner.progress import Progress, Silence


def test_nobody_needs_to_watch(capfd: pytest.CaptureFixture[str]) -> None:
    silence: Progress = Silence()
    silence.phase_started("one")
    silence.note("a note")
    silence.output("a line")
    silence.phase_finished("one", 1.5)
    assert capfd.readouterr() == ("", "")
