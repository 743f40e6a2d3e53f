"""Tests what commands on environments print, on a fake cloud."""

from __future__ import annotations

from typing import Any

import pytest

from provisioner.cli import environment_commands
from provisioner.clock import now
from provisioner.environment import lifecycle
from provisioner.environment.operations import IntermediateScore
from provisioner.models import ScoreLogEntry
from tests.unit.conftest import CommandLine
from tests.unit.fakes.world import environment


@pytest.mark.parametrize(
    ("message", "details", "lines"),
    [
        ({"hint": "more"}, {"loss": 2}, ['message: {"hint": "more"}', 'details: {"loss": 2}']),
        ({}, {}, []),
        ({"x": "\x9b2J\u202e"}, {}, ['message: {"x": "\ufffd2J\ufffd"}']),
    ],
    ids=["both", "neither", "hostile"],
)
def test_an_intermediate_score_is_shown_with_its_message_and_details(
    provisioner: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
    message: dict[str, Any],
    details: dict[str, Any],
    lines: list[str],
) -> None:
    running = environment()
    entry = ScoreLogEntry(score=0.5, message=message, details=details, scored_at=now(), elapsed_seconds=1)
    scored = IntermediateScore(entry, {}, "", "")
    monkeypatch.setattr(environment_commands, "environment_session", lambda *_: (None, running))
    monkeypatch.setattr(lifecycle, "intermediate_score", lambda *_: (running, scored))
    assert provisioner("score", running.id, "--intermediate").stdout.splitlines() == ["score: 0.5", *lines]


def test_a_long_message_of_an_intermediate_score_is_cut(
    provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = environment()
    entry = ScoreLogEntry(score=None, message={"x": "y" * 10**6}, scored_at=now(), elapsed_seconds=1)
    scored = IntermediateScore(entry, {}, "", "")
    monkeypatch.setattr(environment_commands, "environment_session", lambda *_: (None, running))
    monkeypatch.setattr(lifecycle, "intermediate_score", lambda *_: (running, scored))
    shown = provisioner("score", running.id, "--intermediate").stdout
    assert shown.endswith(" [...]\n")
    assert len(shown) < 5000
