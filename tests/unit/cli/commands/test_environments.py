"""Tests what commands on environments print, on a fake cloud."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest

from provisioner.base.clock import now
from provisioner.base.errors import UsageError
from provisioner.base.models import ScoreLogEntry
from provisioner.cli.commands import run, score, test
from provisioner.clouds.local import host, machine
from provisioner.clouds.local.cloud import KVM_ANSWER
from provisioner.environment import lifecycle
from provisioner.environment.operations import IntermediateScore
from provisioner.session import Session
from provisioner.ssh.exchange import StreamSize
from provisioner.store.home import Home
from tests.command_line import ROOT
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
def test_an_intermediate_score_has_its_message_and_details(
    provisioner: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
    message: dict[str, Any],
    details: dict[str, Any],
    lines: list[str],
) -> None:
    running = environment()
    entry = ScoreLogEntry(score=0.5, message=message, details=details, scored_at=now(), elapsed_seconds=1)
    scored = IntermediateScore(entry, {}, "", "")
    monkeypatch.setattr(score, "environment_session", lambda *_: (None, running))
    monkeypatch.setattr(lifecycle, "intermediate_score", lambda *_: (running, scored))
    assert provisioner("score", running.id, "--intermediate").stdout.splitlines() == ["score: 0.5", *lines]


def test_an_intermediate_score_says_what_was_cut_out(provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    running = environment()
    scored = IntermediateScore(None, {}, "", "much", StreamSize(), StreamSize(9000, 8996))
    monkeypatch.setattr(score, "environment_session", lambda *_: (None, running))
    monkeypatch.setattr(lifecycle, "intermediate_score", lambda *_: (running, scored))
    said = provisioner("score", running.id, "--intermediate", "--json").json
    assert (said["stdout_cut_bytes"], said["stderr_bytes"], said["stderr_cut_bytes"]) == (0, 9000, 8996)


def test_a_long_message_of_an_intermediate_score_is_cut(
    provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = environment()
    entry = ScoreLogEntry(score=None, message={"x": "y" * 10**6}, scored_at=now(), elapsed_seconds=1)
    scored = IntermediateScore(entry, {}, "", "")
    monkeypatch.setattr(score, "environment_session", lambda *_: (None, running))
    monkeypatch.setattr(lifecycle, "intermediate_score", lambda *_: (running, scored))
    shown = provisioner("score", running.id, "--intermediate").stdout
    assert shown.endswith(" [...]\n")
    assert len(shown) < 5000


@pytest.mark.parametrize("option", [[], ["--no-record"]], ids=["", "--no-record"])
@pytest.mark.parametrize("command", ["up", "run --submission-file /dev/null", "test"])
def test_a_command_records_unless_it_is_told_not_to(
    provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch, command: str, option: list[str]
) -> None:
    def begin(opened: Session, *_: object, **__: object) -> NoReturn:
        raise UsageError(f"record is {opened.record}")

    monkeypatch.setattr(lifecycle, "up", begin)
    monkeypatch.setattr(run, "run_task", begin)
    monkeypatch.setattr(test, "run_task_tests", begin)
    name, *arguments = command.split()
    family = str(ROOT / "tests" / "contract" / "families" / "echo")
    assert f"record is {not option}" in provisioner(name, family, "main", *arguments, *option).stderr


def test_up_says_what_to_do_next(provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lifecycle, "up", lambda *_: environment("echo-main-bcd234"))
    (tmp_path / "my secrets").write_text("A=b\n")
    family = str(ROOT / "tests" / "contract" / "families" / "echo")
    said = provisioner("up", family, "main", "--env-file", str(tmp_path / "my secrets")).stdout
    assert f"  provisioner score echo-main-bcd234 --env-file '{tmp_path}/my secrets'    score its submission" in said
    assert "  provisioner destroy echo-main-bcd234    remove it" in provisioner("up", family, "main").stdout


@pytest.mark.parametrize("option", [[], ["--no-template"]], ids=["", "--no-template"])
@pytest.mark.parametrize("command", ["up", "run --submission-file /dev/null", "test"])
def test_machines_start_from_templates_by_default(
    provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch, command: str, option: list[str]
) -> None:
    home = Home(provisioner.home)
    home.make()
    (home.root / KVM_ANSWER).write_text(json.dumps({"boot": host.BOOT_ID.read_text().strip(), "works": False}))
    planned = environment("echo-main-bcd234")

    def prepare(opened: Session, *_: object, **__: object) -> NoReturn:
        opened.cloud.prepare(planned, {role: {} for role in planned.machines})
        raise UsageError("the machines are prepared")

    monkeypatch.setattr(lifecycle, "up", prepare)
    monkeypatch.setattr(run, "run_task", prepare)
    monkeypatch.setattr(test, "run_task_tests", prepare)
    name, *arguments = command.split()
    family = str(ROOT / "tests" / "contract" / "families" / "echo")
    ended = provisioner(name, family, "main", *arguments, *option)
    assert "the machines are prepared" in ended.stderr
    for role in planned.machines:
        wants = home.environments / planned.id / role / machine.WANTS_TEMPLATE
        assert wants.exists() is not bool(option)
