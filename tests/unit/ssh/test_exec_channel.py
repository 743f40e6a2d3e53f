"""Tests how calls reach a machine whose exec server does not answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from paramiko.common import OPEN_FAILED_CONNECT_FAILED

from provisioner.base.errors import MachineLostError, NotStartedError
from provisioner.ssh import exec_channel
from provisioner.ssh.connection import Connection
from tests.unit.fakes.sshd import Sshd
from tests.unit.ssh.test_connection import login_to
from tests.waiting import BOUND_SECONDS


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    """A machine whose server does not answer; `service` in the directory says that it has one."""
    monkeypatch.setattr(exec_channel, "SERVICE", str(tmp_path / "service"))
    monkeypatch.setattr(exec_channel, "PAUSE_SECONDS", 0.1)
    with Sshd() as server:
        server.has_server = False
        yield server


def test_a_machine_that_has_no_server_yet_gets_one_for_each_call(server: Sshd, tmp_path: Path) -> None:
    with Connection(login_to(server, tmp_path)) as connection:
        script = "cat; echo err >&2; kill -TERM $$"
        done = connection.run(["sh", "-c", script], stdin=b"in" * 100_000)
        assert (done.exit_code, done.stdout, done.stderr) == (143, b"in" * 100_000, b"err\n")
        connection.write_file(str(tmp_path / "new" / "file"), b"data")
        assert connection.read_file(str(tmp_path / "new" / "file"), 4) == b"data"
    assert sum("python3" in command for command in server.commands) == 3


def test_a_machine_whose_server_has_ended_is_lost(
    server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exec_channel, "START_SECONDS", 0.5)
    (tmp_path / "service").touch()
    with (
        Connection(login_to(server, tmp_path)) as connection,
        pytest.raises(MachineLostError, match="exec server has ended"),
    ):
        connection.run(["true"])
    assert not any("python3" in command for command in server.commands)


def test_a_server_that_starts_again_is_waited_for(server: Sshd, tmp_path: Path) -> None:
    (tmp_path / "service").touch()

    class Commands(list[str]):
        """Has the server start once a caller has asked whether the machine has one."""

        def append(self, command: str) -> None:
            super().append(command)
            server.has_server = True

    server.commands = Commands()
    with Connection(login_to(server, tmp_path)) as connection:
        assert connection.run(["true"]).exit_code == 0
    assert server.commands == [f"test -e {tmp_path}/service"]


def test_a_wait_for_the_server_can_be_stopped(server: Sshd, tmp_path: Path) -> None:
    (tmp_path / "service").touch()
    asked: list[int] = []
    is_connected = False

    def check() -> None:
        if is_connected:
            asked.append(1)
        if len(asked) == 3:
            raise InterruptedError("the worker has lost its database")

    with Connection(login_to(server, tmp_path), check=check) as connection:
        is_connected = True
        with pytest.raises(InterruptedError):
            connection.run(["true"])


def test_a_call_that_times_out_keeps_the_connection(server: Sshd, tmp_path: Path) -> None:
    (tmp_path / "service").touch()
    with Connection(login_to(server, tmp_path)) as connection:
        with pytest.raises(NotStartedError, match="did not start true"):
            connection.run(["true"], timeout_seconds=1)
        server.has_server = True
        assert connection.run(["true"]).exit_code == 0


@pytest.mark.parametrize("timeout_seconds", [180, None])
def test_a_machine_that_is_frozen_has_not_started_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout_seconds: float | None
) -> None:
    thaw = threading.Event()

    def freeze(*_: object) -> int:
        thaw.wait(BOUND_SECONDS)
        return OPEN_FAILED_CONNECT_FAILED

    monkeypatch.setattr("tests.unit.fakes.sshd._Server.check_channel_request", freeze)
    with Sshd() as server, Connection(login_to(server, tmp_path)) as connection:
        monkeypatch.setattr("provisioner.ssh.connection.HANDSHAKE_SECONDS", 0.5)
        with pytest.raises(NotStartedError, match="does not answer"):
            connection.run(["true"], timeout_seconds=timeout_seconds)
        thaw.set()
