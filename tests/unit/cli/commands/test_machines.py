"""Tests the commands that work in a machine, on a fake cloud whose machines answer over SSH."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest

from provisioner.cli.commands import agent, exec
from provisioner.cli.standard_input import StandardInput
from provisioner.environment.agent import AgentResult
from provisioner.session import Session
from provisioner.ssh.exchange import StreamSize
from provisioner.store.files import locked
from tests.unit.conftest import CommandLine
from tests.unit.fakes.world import environment, up


def test_exec_ends_quietly_when_its_reader_has_gone(
    provisioner: CommandLine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = up(session, environment())
    monkeypatch.setattr(exec, "environment_session", lambda _: (session, running))
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(exec, "_write", lambda _, data: os.write(writer, data))
    done = provisioner("exec", running.id, "--", "yes")
    os.close(writer)
    assert (done.code, done.stdout, done.stderr) == (1, "", "")


def test_a_running_batchs_environment_needs_its_whole_id(provisioner: CommandLine, session: Session) -> None:
    store = session.environments
    store.save(environment("fam-main-bcd234", batch="nightly"))
    with locked(store.lease("fam-main-bcd234")):
        for command in (["exec", "fam-main", "--", "true"], ["destroy", "fam-main"]):
            done = provisioner(*command)
            assert done.code == 2
            assert "belongs to the running batch nightly" in done.stderr
        assert store.exists("fam-main-bcd234")
        assert "is not up" in provisioner("exec", "fam-main-bcd234", "--", "true").stderr  # so it was found
    assert "is not up" in provisioner("exec", "fam-main", "--", "true").stderr
    store.save(environment("fam-main-bcd234", batch=""))
    with locked(store.lease("fam-main-bcd234")):
        assert "is not up" in provisioner("exec", "fam-main", "--", "true").stderr


def test_exec_gives_the_command_this_process_s_input(
    provisioner: CommandLine, session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "input").write_bytes(bytes(range(256)) * 1000)
    running = up(session, environment())
    monkeypatch.setattr(exec, "environment_session", lambda _: (session, running))
    with (tmp_path / "input").open("rb") as file:
        monkeypatch.setattr(exec, "StandardInput", lambda: StandardInput(file.fileno()))
        done = provisioner("exec", running.id, "--json", "--", "sh", "-c", "sha256sum; exit 3")
    assert done.code == 3
    assert done.json["stdout"].split()[0] == hashlib.sha256(bytes(range(256)) * 1000).hexdigest()


def test_exec_says_for_each_stream_how_much_was_cut_out_of_it(
    provisioner: CommandLine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = up(session, environment())
    monkeypatch.setattr(exec, "environment_session", lambda _: (session, running))
    done = provisioner("exec", running.id, "--json", "--", "sh", "-c", "head -c 14000000 /dev/zero; echo few >&2")
    assert (done.code, done.json["stdout_bytes"], done.json["stderr_bytes"]) == (0, 14_000_000, 4)
    assert (done.json["stdout_cut_bytes"], done.json["stderr_cut_bytes"]) == (14_000_000 - (8 << 20), 0)
    assert len(done.json["stdout"]) == (8 << 20) + len("\n[... 5611392 bytes cut out ...]\n")


def test_an_agents_result_says_how_much_was_cut_out(
    provisioner: CommandLine, session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    running = environment()
    ended = AgentResult(0, False, b"beginning end", b"", StreamSize(5000, 4987))
    monkeypatch.setattr(agent, "environment_session", lambda *_: (session, running))
    monkeypatch.setattr(agent, "run_agent", lambda *_: ended)
    said = provisioner("agent", running.id, str(tmp_path), "true", "--json").json
    assert (said["stdout_bytes"], said["stdout_cut_bytes"], said["stderr_cut_bytes"]) == (5000, 4987, 0)


def test_output_waits_for_a_slow_reader() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    data = os.urandom(1 << 20)
    writing = threading.Thread(target=exec._write, args=(writer, data))
    writing.start()
    got = b""
    while len(got) < len(data):
        got += os.read(reader, 1 << 12)
    writing.join()
    assert got == data
    os.close(reader)
    os.close(writer)
