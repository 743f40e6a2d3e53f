"""Tests that Inspect's operator sees what matters, without a traffic of phases."""

from __future__ import annotations

import logging

import pytest

from provisioner.inspect.listener import Listener


def test_notes_are_shown_and_phases_only_at_info(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener("task \x1b]0;1")
    with caplog.at_level(logging.INFO, "provisioner.inspect"):
        listener.note("Waiting\x1b]2;until others have ended.")
        listener.phase_started("boot")
        listener.phase_finished("boot", 1.25)
    shown = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in shown] == [logging.WARNING, logging.INFO]
    assert ": Waiting" in shown[0][1]
    assert shown[1][1].endswith("1: boot took 1.2 s")
    assert "\x1b" not in "".join(text for _, text in shown)
