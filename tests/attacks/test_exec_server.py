"""A machine whose exec server was replaced costs the controller at most 64 MiB and a bounded time.

The attacker is root in the machine: it has put another program behind the socket to which the controller's calls go.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from provisioner.base.errors import TaskError
from provisioner.ssh.connection import Connection
from provisioner.ssh.exec_frames import ALIVE, EXIT, STARTED, STDERR, STDOUT, frame
from tests.attacks.hostile_sshd import MEMORY_MIB, attacked, key_file, logged_in, rest
from tests.campaigns import cases
from tests.unit.fakes.exec_call import Call, header
from tests.unit.fakes.sshd import Sshd
from tests.unit.ssh.test_connection import login_to
from tests.waiting import BOUND_SECONDS

PIECE = bytes(60_000)


@pytest.fixture(autouse=True)
def silent_paramiko(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "paramiko")


def says(*frames: bytes) -> Callable[[Call], None]:
    """Returns a server that answers so, and then waits."""

    def program(call: Call) -> None:
        for each in frames:
            call.channel.sendall(each)
        rest(call)

    return program


def for_ever(first: bytes, then: bytes, pause: float = 0) -> Callable[[Call], None]:
    def program(call: Call) -> None:
        call.channel.sendall(first)
        while True:
            call.channel.sendall(then)
            time.sleep(pause)

    return program


VIOLATIONS = {
    "long frame": says(frame(STARTED), header(STDOUT, 0xFFFF_FFFF)),
    "long end": says(frame(STARTED), header(EXIT, 1 << 24)),
    "no frame": for_ever(b"", PIECE),
    "output before the start": for_ever(b"", frame(STDERR, PIECE)),
    "endless starts": for_ever(b"", frame(STARTED)),
    "endless signs of life": for_ever(frame(STARTED), frame(ALIVE) * 500),
    "empty output": for_ever(frame(STARTED), frame(STDOUT)),
    "garbage": says(frame(STARTED), frame(EXIT, b"{" * 5000)),
    "odd end": says(frame(STARTED), frame(EXIT, json.dumps({"code": 1 << 40}).encode())),
    "another alphabet": says(frame(STARTED), frame(EXIT, b'{"code": "\xff"}')),
    "output after the end": says(frame(STARTED), frame(EXIT, b'{"code": 0}') + frame(STDOUT, b"late")),
}


@pytest.mark.parametrize("attack", VIOLATIONS)
def test_a_broken_exec_protocol_loses_the_connection(tmp_path: Path, attack: str) -> None:
    with logged_in(VIOLATIONS[attack]) as server:
        outcome = attacked(server.port, key_file(tmp_path), server.host_key, timeout_seconds=BOUND_SECONDS)
    assert outcome.error == "TaskError", outcome
    assert "exec server" in outcome.message
    assert outcome.message.isprintable()
    assert outcome.mib < MEMORY_MIB


STALLS = {
    "silence": says(),
    "no end": says(frame(STARTED), frame(STDOUT, b"x")),
    "half a frame": says(frame(STARTED), header(STDOUT, 60_000) + b"x"),
    "drip": for_ever(frame(STARTED), frame(STDOUT, b"."), 0.2),
    "slow frame": for_ever(frame(STARTED) + header(STDOUT, 60_000), b".", 0.01),
    "endless output": for_ever(frame(STARTED), frame(STDOUT, PIECE)),
}
# These take more than a few seconds.
LONG = {"endless output"}


@pytest.mark.parametrize("attack", cases(STALLS, left=LONG))
def test_the_controller_ends_a_call_that_never_ends(tmp_path: Path, attack: str) -> None:
    with logged_in(STALLS[attack]) as server:
        outcome = attacked(server.port, key_file(tmp_path), server.host_key)
    assert outcome.error == "CommandTimeoutError", outcome
    assert outcome.mib < MEMORY_MIB


def test_a_file_that_is_longer_than_asked_for_is_refused(tmp_path: Path) -> None:
    def program(call: Call) -> int:
        call.say(bytes(1 << 20))
        return 0

    with (
        logged_in(program) as server,
        Connection(login_to(server, tmp_path)) as connection,
        pytest.raises(TaskError, match="than it was asked for"),
    ):
        connection.read_file("/etc/hostname", 1000)


def test_words_of_the_machine_are_printable(tmp_path: Path) -> None:
    def program(call: Call) -> None:
        call.channel.sendall(frame(EXIT, json.dumps({"errno": 2, "what": "user", "text": "\x1b]0;a\a" * 300}).encode()))

    with Sshd(program) as server, Connection(login_to(server, tmp_path)) as connection:
        done = connection.run(["true"])
    assert done.exit_code == 127
    assert done.stderr.decode().strip().isprintable()
    assert len(done.stderr) < 10_000
