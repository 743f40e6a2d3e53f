"""Tests calls over a connection that OpenSSH keeps, against a real server in this process."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.base.errors import CommandTimeoutError, MachineLostError
from provisioner.base.signals import no_check
from provisioner.copying.transfer import download, upload
from provisioner.ssh.calls import SOCKET
from provisioner.ssh.openssh import KeptConnection, end_connection, keep_connection
from tests.kept import be_patient, keepers
from tests.unit.fakes.sshd import Sshd
from tests.unit.ssh.test_connection import login_to, sh
from tests.waiting import until

Stop = type("Stop", (Exception,), {})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    be_patient(monkeypatch)
    with Sshd() as server:
        yield server


@pytest.fixture
def path(server: Sshd, tmp_path: Path) -> Iterator[Path]:
    """The socket of a connection that is kept."""
    directory = tmp_path / ("long" * 40)  # longer than the path of a Unix socket may be
    keys, path = directory / "keys", directory / "connection-primary"
    keys.mkdir(parents=True)
    login = login_to(server, keys)
    login.private_key.chmod(0o600)
    keep_connection(login, keys / "known_hosts_primary", path, SOCKET, no_check)
    yield path
    end_connection(path)
    until(lambda: not keepers(directory))


@pytest.fixture
def connection(path: Path) -> Iterator[KeptConnection]:
    with KeptConnection(path, "machine:22") as connection:
        assert connection.answers()
        yield connection


def test_a_command_has_its_input_output_and_exit_code(connection: KeptConnection) -> None:
    data = bytes(range(256)) * 12_000
    assert connection.run(["cat"], stdin=io.BytesIO(data)).stdout == data
    done = connection.run(sh("exec <&-; echo out; echo err >&2; exit 4"), stdin=b"x" * (4 << 20))
    assert (done.exit_code, done.stdout, done.stderr) == (4, b"out\n", b"err\n")
    assert connection.run(sh("kill -KILL $$")).exit_code == 137
    assert connection.run(["/nonexistent"]).exit_code == 127


def test_trees_are_copied_both_ways(connection: KeptConnection, tmp_path: Path) -> None:
    (tmp_path / "sent" / "deep").mkdir(parents=True)
    (tmp_path / "sent" / "deep" / "file").write_bytes(bytes(1 << 20))
    upload(connection, tmp_path / "sent", str(tmp_path / "there"))
    assert download(connection, str(tmp_path / "there"), tmp_path / "back").files == 1
    assert (tmp_path / "back" / "deep" / "file").read_bytes() == bytes(1 << 20)


def test_a_command_that_is_given_up_ends_in_the_machine(connection: KeptConnection) -> None:
    said: list[bytes] = []

    def stop(output: bytes) -> None:
        said.append(output)
        raise Stop

    with pytest.raises(Stop):
        connection.run(sh("echo $$; exec sleep 1000"), on_stdout=stop)
    until(lambda: not Path(f"/proc/{int(said[0])}").exists())
    with pytest.raises(CommandTimeoutError):
        connection.run(["sleep", "1000"], timeout_seconds=0.2)
    assert connection.run(["true"]).exit_code == 0


def test_closing_ends_the_calls_and_not_what_openssh_keeps(path: Path, connection: KeptConnection) -> None:
    with pytest.raises(MachineLostError):
        connection.run(sh("echo one; exec sleep 1000"), on_stdout=lambda _: connection.close())
    assert not connection.active
    with KeptConnection(path, "machine:22") as another:
        assert another.run(["true"]).exit_code == 0


def test_a_connection_that_breaks_during_a_command_is_lost(server: Sshd, connection: KeptConnection) -> None:
    with pytest.raises(MachineLostError, match="machine:22 broke"):
        connection.run(sh("echo one; exec sleep 1000"), on_stdout=lambda _: server.cut())


def test_a_machine_without_an_exec_server_does_not_answer(server: Sshd, path: Path) -> None:
    server.has_server = False
    with KeptConnection(path, "machine:22") as connection:
        assert connection.listens()
        assert not connection.answers()
