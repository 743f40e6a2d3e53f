"""Tests the commands that work in a machine, on a fake cloud whose machines answer over SSH."""

from __future__ import annotations

import os

import pytest

from provisioner.cli import machine_commands
from provisioner.session import Session
from tests.unit.conftest import CommandLine
from tests.unit.fakes.world import environment, up


def test_exec_ends_quietly_when_the_reader_of_its_output_has_gone(
    provisioner: CommandLine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = up(session, environment())
    monkeypatch.setattr(machine_commands, "environment_session", lambda _: (session, running))
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(machine_commands, "_write", lambda _, data: os.write(writer, data))
    done = provisioner("exec", running.id, "--", "yes")
    os.close(writer)
    assert (done.code, done.stdout, done.stderr) == (1, "", "")
