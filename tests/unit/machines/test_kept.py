"""Tests connections that OpenSSH keeps for later commands, against SSH servers in this process."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from provisioner.base.errors import MachineLostError
from provisioner.base.models import Environment
from provisioner.environment import lifecycle
from provisioner.machines import connect
from provisioner.machines.connect import connect_kept, end_kept
from provisioner.machines.destroy import destroy_machines
from provisioner.session import Session
from provisioner.ssh import openssh
from provisioner.ssh.connection import Connection
from provisioner.ssh.keys import ed25519_key_pair
from provisioner.ssh.openssh import KeptConnection
from tests.kept import be_patient, keepers
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.sshd import Sshd
from tests.unit.fakes.world import told_of, up
from tests.waiting import until


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.fixture
def running(session: Session) -> Iterator[Environment]:
    running = up(session)
    yield running
    end_kept(session, running)


@pytest.fixture
def directory(session: Session, running: Environment) -> Path:
    return session.environments.directory(running.id)


@pytest.fixture
def sshd(cloud: FakeCloud, running: Environment) -> Sshd:
    server = cloud.machine(running).sshd
    until(lambda: server.connections() == 0)
    return server


def run(session: Session, running: Environment, *argv: str) -> bytes:
    with connect_kept(session, running, "primary") as connection:
        assert isinstance(connection, KeptConnection)
        return connection.run(argv, user="agent").stdout


def test_a_second_command_goes_over_the_connection_of_the_first(
    session: Session, running: Environment, sshd: Sshd, directory: Path
) -> None:
    logins = sshd.logins
    assert run(session, running, "echo", "one") == b"one\n"
    [keeper] = keepers(directory)
    assert run(session, running, "echo", "two") == b"two\n"
    assert keepers(directory) == [keeper]
    assert sshd.logins == logins + 1


def test_a_keeper_has_nothing_of_the_commands_own(
    session: Session, running: Environment, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROVISIONER_DATABASE", "postgres://user:secret@host/base")
    run(session, running, "true")
    [keeper] = keepers(directory)
    for number in range(3):
        assert str(Path(f"/proc/{keeper}/fd/{number}").readlink()) == "/dev/null"
    assert os.getsid(keeper) != os.getsid(0)
    assert b"secret" not in Path(f"/proc/{keeper}/environ").read_bytes()
    limits = Path(f"/proc/{keeper}/limits").read_text()
    assert limits.split("Max data size")[1].split()[0] == str(openssh.MEMORY_BYTES)
    assert limits.split("Max cpu time")[1].split()[0] == str(openssh.CPU_SECONDS)
    for name in ("connection-primary", "connection-primary.control"):
        assert (directory / name).stat().st_mode & 0o777 == 0o600


def test_commands_that_begin_at_once_share_one_connection(
    session: Session, running: Environment, sshd: Sshd, directory: Path
) -> None:
    logins = sshd.logins
    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(lambda text: run(session, running, "echo", text), "abcd"))
    assert said == [b"a\n", b"b\n", b"c\n", b"d\n"]
    assert len(keepers(directory)) == 1
    assert sshd.logins == logins + 1


@pytest.mark.parametrize("end", ["killed", "cut"])
def test_a_command_after_the_connection_s_end_opens_another(
    session: Session, running: Environment, sshd: Sshd, directory: Path, end: str
) -> None:
    run(session, running, "true")
    [keeper] = keepers(directory)
    if end == "killed":
        os.kill(keeper, signal.SIGKILL)
    else:
        sshd.cut()
    until(lambda: not keepers(directory))
    assert (directory / "connection-primary").exists()
    assert run(session, running, "echo", "again") == b"again\n"


def test_a_command_whose_connection_breaks_says_so(session: Session, running: Environment, sshd: Sshd) -> None:
    with connect_kept(session, running, "primary") as connection, pytest.raises(MachineLostError, match="broke"):
        connection.run(["sh", "-c", "echo one; exec sleep 1000"], user="agent", on_stdout=lambda _: sshd.cut())


def test_a_kept_connection_without_answers_is_not_used(
    session: Session, running: Environment, sshd: Sshd, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(session, running, "true")
    monkeypatch.setattr(openssh, "ANSWER_SECONDS", 0.2)
    [keeper] = keepers(directory)
    os.kill(keeper, signal.SIGSTOP)
    try:
        with connect_kept(session, running, "primary") as connection:
            assert isinstance(connection, Connection)
            assert connection.run(["echo", "own"], user="agent").stdout == b"own\n"
    finally:
        os.kill(keeper, signal.SIGKILL)


def test_a_machine_that_has_ended_is_told_at_once(
    cloud: FakeCloud, session: Session, running: Environment, sshd: Sshd
) -> None:
    cloud.off.add((running.id, "primary"))
    logins = sshd.logins
    with pytest.raises(MachineLostError, match=f"The primary machine of {running.id} is no longer running"):
        connect_kept(session, running, "primary")
    assert sshd.logins == logins


def test_a_machine_that_stands_still_is_told_at_once(
    cloud: FakeCloud, session: Session, running: Environment, sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(session, running, "echo", "one") == b"one\n"
    logins = sshd.logins
    monkeypatch.setattr(cloud, "standstill", lambda *_: "its QEMU is stopped")
    with pytest.raises(MachineLostError, match="cannot answer: its QEMU is stopped"):
        connect_kept(session, running, "primary")
    assert sshd.logins == logins


def test_a_machine_that_keeps_silent_is_told(
    session: Session, running: Environment, sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence = f"{running.id}: the primary machine does not answer yet; waiting up to 90 s"
    monkeypatch.setattr(connect, "SILENCE_SECONDS", 0.01)
    # It answers only after the operator has been told.
    monkeypatch.setattr(connect, "keep_connection", lambda *_: until(lambda: silence in told_of(session).notes))
    with connect_kept(session, running, "primary") as connection:
        assert connection.run(["echo", "own"], user="agent").stdout == b"own\n"


def test_without_openssh_each_command_connects_by_itself(
    session: Session, running: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with connect_kept(session, running, "primary") as connection:
        assert isinstance(connection, Connection)
        assert connection.run(["/bin/echo", "own"], user="agent").stdout == b"own\n"


def test_another_host_key_is_refused_before_ours_is_offered(
    session: Session, running: Environment, sshd: Sshd, directory: Path
) -> None:
    offered: list[str] = []

    def note(_: str, key: str) -> bool:
        offered.append(key)
        return True

    sshd.authorize = note
    sshd.shown_key_pair = ed25519_key_pair()
    with pytest.raises(MachineLostError, match="shows a host key that is not the machine's"):
        connect_kept(session, running, "primary")
    assert (offered, keepers(directory)) == ([], [])


def test_an_unused_connection_ends_even_if_the_home_is_gone(
    session: Session, running: Environment, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openssh, "IDLE_SECONDS", 1)
    moved = directory.with_name("moved")

    def move(_: bytes) -> None:
        if not moved.exists():
            directory.rename(moved)

    def is_kept() -> bool:
        with connect_kept(session, running, "primary") as connection:
            if isinstance(connection, KeptConnection):
                with contextlib.suppress(MachineLostError):  # it has been idle for a second, on a busy host
                    connection.run(["echo", "used"], user="agent", on_stdout=move)
        return moved.exists()

    until(is_kept)
    until(lambda: not keepers(moved))
    moved.rename(directory)


def test_destroying_an_environment_ends_its_connections(
    session: Session, running: Environment, directory: Path
) -> None:
    run(session, running, "true")
    assert keepers(directory)
    destroy_machines(session, running)
    until(lambda: not keepers(directory))


def test_a_connection_that_cannot_end_keeps_no_environment(
    session: Session, running: Environment, directory: Path, monkeypatch: pytest.MonkeyPatch, cloud: FakeCloud
) -> None:
    run(session, running, "true")
    [keeper] = keepers(directory)
    monkeypatch.setattr(openssh, "LOCAL_SECONDS", 0.2)
    os.kill(keeper, signal.SIGSTOP)
    try:
        lifecycle.destroy(session, running)
    finally:
        os.kill(keeper, signal.SIGKILL)
    assert cloud.existing() == []
