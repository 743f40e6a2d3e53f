"""What a machine's sshd sends on a connection that OpenSSH keeps reaches nothing here, and costs little.

The attacker is root in the machine, and holds its host key: OpenSSH logs in to whatever runs there.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest
from paramiko.common import MSG_CHANNEL_DATA, MSG_CHANNEL_OPEN, MSG_DEBUG, MSG_GLOBAL_REQUEST, MSG_IGNORE

from provisioner.base.errors import CommandTimeoutError, MachineLostError, TaskError
from provisioner.base.signals import no_check
from provisioner.ssh import openssh
from provisioner.ssh.calls import SOCKET
from provisioner.ssh.keys import ed25519_key_pair
from provisioner.ssh.openssh import KeptConnection, end_connection, keep_connection
from tests.attacks.hostile_sshd import MEMORY_MIB, logged_in, message, send
from tests.kept import be_patient, keepers
from tests.unit.fakes.exec_call import Call
from tests.unit.fakes.sshd import Sshd
from tests.unit.ssh.test_connection import login_to
from tests.waiting import until

PIECE = bytes(32_000)


@pytest.fixture(autouse=True)
def silent_paramiko(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "paramiko")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    be_patient(monkeypatch)
    monkeypatch.setattr(openssh, "CPU_SECONDS", 1)
    with logged_in(lambda _: 0) as server:
        yield server


@pytest.fixture
def path(server: Sshd, tmp_path: Path) -> Iterator[Path]:
    keys = tmp_path / "keys"
    keys.mkdir()
    login = login_to(server, keys)
    login.private_key.chmod(0o600)
    path = tmp_path / "connection-primary"
    keep_connection(login, keys / "known_hosts_primary", path, SOCKET, no_check)
    yield path
    server.over.set()
    end_connection(path)
    until(lambda: not keepers(tmp_path))


def honest_once(attack: Callable[[Call], int]) -> Callable[[Call], int]:
    """Answers what asks whether the machine is there, and attacks all other calls."""

    def program(call: Call) -> int:
        return errno.EISDIR if call.request["operation"] == "read" else attack(call)

    return program


def transport_of(call: Call) -> paramiko.Transport:
    assert call.channel.transport is not None
    return call.channel.transport


def test_the_machine_can_open_nothing_here(server: Sshd, path: Path) -> None:
    known_hosts = (path.parent / "keys" / "known_hosts_primary").read_text()
    refused: list[int] = []

    def attack(call: Call) -> int:
        transport = transport_of(call)
        here = ("127.0.0.1", 22)
        for kind in ("forwarded-tcpip", "x11", "auth-agent@openssh.com", "session", "tun@openssh.com", "direct-tcpip"):
            source = here if kind.endswith("tcpip") or kind == "x11" else None
            with pytest.raises(paramiko.ChannelException) as caught:
                transport.open_channel(kind, here if source else None, source)
            refused.append(caught.value.code)
        for request in ("tcpip-forward", "streamlocal-forward@openssh.com"):
            assert transport.global_request(request, ("127.0.0.1", 9)) is None
        transport.global_request("hostkeys-00@openssh.com", ed25519_key_pair().public)  # confirmed, and not heeded
        return 0

    server.program = honest_once(attack)
    with KeptConnection(path, "machine:22") as connection:
        assert connection.answers()
        assert connection.run(["attack"]).exit_code == 0
    assert len(refused) == 6
    assert (path.parent / "keys" / "known_hosts_primary").read_text() == known_hosts


def rekey(call: Call) -> None:
    transport_of(call).renegotiate_keys()


FLOODS: dict[str, Callable[[Call], None]] = {
    "output": lambda call: send(call, message(MSG_CHANNEL_DATA, call.channel.remote_chanid, PIECE)),
    "ignore": lambda call: send(call, message(MSG_IGNORE, PIECE)),
    "debug": lambda call: send(call, message(MSG_DEBUG, True, b"\x1b]52;c;aGk=\a" * 2000, b"")),
    "requests": lambda call: send(call, message(MSG_GLOBAL_REQUEST, b"x" * 9000, True)),
    "channels": lambda call: send(call, message(MSG_CHANNEL_OPEN, b"x11", 1, 1, 1, b"", 1)),
    "keys": rekey,
}


@pytest.mark.campaign
@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_costs_little_memory_and_ends_the_connection(server: Sshd, path: Path, flood: str) -> None:
    def attack(call: Call) -> int:
        call.start()
        while transport_of(call).is_active():
            FLOODS[flood](call)
        raise EOFError

    server.program = honest_once(attack)
    [keeper] = keepers(path.parent)
    with KeptConnection(path, "machine:22") as connection:
        assert connection.answers()
        with pytest.raises((CommandTimeoutError, MachineLostError, TaskError)):
            connection.run(["attack"], timeout_seconds=1)
    peak_mib = 0

    def has_ended() -> bool:
        nonlocal peak_mib
        peak_mib = max(peak_mib, memory_mib(keeper))
        return keeper not in keepers(path.parent)

    until(has_ended)
    assert peak_mib < MEMORY_MIB


def memory_mib(pid: int) -> int:
    """Returns the most memory that a process ever had resident; 0 if it has ended."""
    try:
        status: Any = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) >> 10 if "VmHWM" in status else 0
    except OSError:
        return 0
