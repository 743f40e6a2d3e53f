"""A machine whose sshd was replaced costs the controller at most 64 MiB and a bounded time.

An endless stream ends for the controller by a limit of its own, or not at all: that no test hangs is the proof.

The attacker is root in the machine. It holds the machine's host key, so the controller logs in to whatever it runs.
"""

from __future__ import annotations

import logging
import select
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paramiko.common import (
    MSG_CHANNEL_DATA,
    MSG_CHANNEL_EXTENDED_DATA,
    MSG_CHANNEL_OPEN,
    MSG_DEBUG,
    MSG_EXT_INFO,
    MSG_GLOBAL_REQUEST,
    MSG_IGNORE,
    MSG_UNIMPLEMENTED,
)

from provisioner.ssh.exec_frames import STDOUT, frame
from provisioner.ssh.keys import ed25519_key_pair
from tests.attacks.hostile_sshd import (
    MEMORY_MIB,
    announce,
    attacked,
    before_login,
    key_file,
    logged_in,
    message,
    rest,
    send,
)
from tests.unit.fakes.exec_call import Call
from tests.unit.fakes.sshd import Sshd
from tests.waiting import BOUND_SECONDS

# The time for an answer of sshd itself that never comes.
ANSWER_SECONDS = 2.0
PIECE = bytes(32_000)
VERSION = b"SSH-2.0-OpenSSH_9.2p1\r\n"


@pytest.fixture(autouse=True)
def silent_paramiko(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "paramiko")


def for_ever(step: Callable[[Call], None]) -> Callable[[Call], int]:
    """Returns a program that repeats a step until the controller has gone."""

    def program(call: Call) -> int:
        call.start()
        assert call.channel.transport is not None
        while call.channel.transport.is_active():
            step(call)
        raise EOFError

    return program


def a_long_packet(call: Call) -> int:
    announce(call, 0xFFFF_FF0C)
    assert call.channel.transport is not None
    while True:
        call.channel.transport.sock.sendall(PIECE)


def beyond_the_window(kind: int, *fields: int) -> Callable[[Call], int]:
    data = frame(STDOUT, PIECE)
    return for_ever(lambda call: send(call, message(kind, call.channel.remote_chanid, *fields, data)))


def a_rekey(call: Call) -> None:
    assert call.channel.transport is not None
    call.channel.transport.renegotiate_keys()


FLOODS = {
    "window": beyond_the_window(MSG_CHANNEL_DATA),
    "stderr": beyond_the_window(MSG_CHANNEL_EXTENDED_DATA, 1),
    "unknown stream": beyond_the_window(MSG_CHANNEL_EXTENDED_DATA, 7),
    "empty output": for_ever(lambda call: send(call, message(MSG_CHANNEL_DATA, call.channel.remote_chanid, b""))),
    "ignore": for_ever(lambda call: send(call, message(MSG_IGNORE, PIECE))),
    "debug": for_ever(lambda call: send(call, message(MSG_DEBUG, True, b"\x1b]52;c;aGk=\a" * 99, b""))),
    "unimplemented": for_ever(lambda call: send(call, message(MSG_UNIMPLEMENTED, 1))),
    "requests": for_ever(lambda call: send(call, message(MSG_GLOBAL_REQUEST, b"x" * 9000, True))),
    "channels": for_ever(lambda call: send(call, message(MSG_CHANNEL_OPEN, b"x11", 1, 1, 1, b"", 1))),
    "keys": for_ever(a_rekey),
    "long packet": a_long_packet,
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_dishonest_sshd_loses_the_connection(tmp_path: Path, flood: str) -> None:
    with logged_in(FLOODS[flood]) as server:
        outcome = attacked(server.port, key_file(tmp_path), server.host_key, timeout_seconds=BOUND_SECONDS)
    assert outcome.error == "TaskError"
    assert "breaks the rules of SSH" in outcome.message
    assert outcome.mib < MEMORY_MIB


def silence(call: Call) -> int:
    rest(call)
    return 0


def pause() -> None:
    """Makes a drip of what is sent."""
    select.select([], [], [], 0.3)


def drip(call: Call) -> int:
    while True:
        call.say(b".")
        pause()


def output_without_end(call: Call) -> int:
    while True:
        call.say(PIECE)


def nothing_is_read(call: Call) -> int:
    """Grants an endless window and stops reading from the connection."""
    send(call, message(93, call.channel.remote_chanid, 0x7FFF_FFFF))
    assert call.channel.transport is not None
    call.channel.transport.packetizer.read_message = lambda: rest(call)  # type: ignore[method-assign, assignment, return-value]
    return silence(call)


def a_list_of_four_billion(call: Call) -> int:
    send(call, message(MSG_EXT_INFO, 0xFFFF_FFFF))
    return silence(call)


STALLS = {
    "silence": silence,
    "drip": drip,
    "output": output_without_end,
    "closed window": silence,
    "nothing read": nothing_is_read,
    "extensions": a_list_of_four_billion,
}


@pytest.mark.parametrize("stall", STALLS)
def test_the_controller_ends_a_command_that_never_ends(tmp_path: Path, stall: str) -> None:
    stdin_bytes = 32 << 20 if stall in ("closed window", "nothing read") else 0
    with logged_in(STALLS[stall]) as server:
        outcome = attacked(server.port, key_file(tmp_path), server.host_key, stdin_bytes=stdin_bytes)
    assert outcome.error == "CommandTimeoutError", outcome
    assert {"TaskError", "TimeoutError"} < set(outcome.kinds)
    assert outcome.mib < MEMORY_MIB + 2 * stdin_bytes / (1 << 20)


@pytest.mark.parametrize("answer", [None, 1], ids=["silence", "refusal"])
def test_an_sshd_that_never_opens_a_channel_is_not_waited_for(
    tmp_path: Path, answer: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not answer, or says that there is no exec server and then not what it has instead."""
    from tests.unit.fakes import sshd

    def wait(server: Any, kind: str, _: int) -> int:
        if answer is None or kind == "session":
            server._sshd.over.wait(BOUND_SECONDS)
        return 1

    monkeypatch.setattr(sshd._Server, "check_channel_request", wait)
    with logged_in(silence) as server:
        outcome = attacked(
            server.port,
            key_file(tmp_path),
            server.host_key,
            timeout_seconds=BOUND_SECONDS,
            answer_seconds=ANSWER_SECONDS,
        )
    assert outcome.error in ("NotStartedError", "MachineLostError"), outcome


def test_late_output_cannot_occupy_the_controller(tmp_path: Path) -> None:
    """The attacker keeps sending output of a command that the controller has given up."""
    first: list[Call] = []

    def program(call: Call) -> int:
        if not first:
            first.append(call)
            return 0
        while True:
            send(call, message(MSG_CHANNEL_DATA, first[0].channel.remote_chanid, b"x"))

    with logged_in(program) as server:
        outcome = attacked(server.port, key_file(tmp_path), server.host_key, timeout_seconds=BOUND_SECONDS, times=2)
    assert outcome.error == "TaskError"


def endless_line(stream: socket.socket) -> None:
    while True:
        stream.sendall(PIECE)


def endless_lines(stream: socket.socket) -> None:
    while True:
        stream.sendall(b"\x1b]0;title\a" + bytes(200) + b"\r\n")


def slow_version(stream: socket.socket) -> None:
    for letter in VERSION * 99:
        stream.sendall(bytes([letter & 0x5F]))
        pause()


def hear_out(stream: socket.socket) -> None:
    """Says no more until the controller has gone."""
    while stream.recv(1 << 16):
        pass


def version_alone(stream: socket.socket) -> None:
    stream.sendall(VERSION)
    hear_out(stream)


def first_packet_of_four_gib(stream: socket.socket) -> None:
    stream.sendall(VERSION + struct.pack(">IB", 0xFFFF_FFFC, 4))
    while True:
        stream.sendall(PIECE)


def foreign_version(stream: socket.socket) -> None:
    stream.sendall(b"SSH-1.5-\x1b]52;c;aGk=\a\xe2\x80\xae" + b"x" * 9000 + b"\r\n")
    hear_out(stream)


def nothing_but_compression(stream: socket.socket) -> None:
    names = [
        b"curve25519-sha256@libssh.org", b"ssh-ed25519", b"aes128-ctr", b"aes128-ctr",
        b"hmac-sha2-256", b"hmac-sha2-256", b"zlib", b"zlib", b"", b"",
    ]  # fmt: skip
    payload = b"\x14" + bytes(16) + b"".join(struct.pack(">I", len(name)) + name for name in names) + bytes(5)
    padding = 16 - (len(payload) + 5) % 8
    stream.sendall(VERSION + struct.pack(">IB", len(payload) + padding + 1, padding) + payload + bytes(padding))
    hear_out(stream)


HANDSHAKES = {
    "silence": hear_out,
    "line": endless_line,
    "lines": endless_lines,
    "slow": slow_version,
    "version": version_alone,
    "length": first_packet_of_four_gib,
    "foreign": foreign_version,
    "compression": nothing_but_compression,
}


@pytest.mark.parametrize("handshake", HANDSHAKES)
def test_a_handshake_ends_in_time_and_in_one_safe_line(tmp_path: Path, handshake: str) -> None:
    with before_login(HANDSHAKES[handshake]) as port:
        outcome = attacked(port, key_file(tmp_path), ed25519_key_pair().public, answer_seconds=ANSWER_SECONDS)
    assert outcome.error in ("MachineLostError", "TaskError"), outcome
    assert outcome.message.isprintable()
    assert len(outcome.message) < 300
    assert outcome.mib < MEMORY_MIB


def test_an_honest_sshd_stays_far_below_every_limit(tmp_path: Path) -> None:
    """A hundred commands, and a copy of some megabytes in small pieces, are no flood."""

    def program(call: Call) -> int:
        call.stdin()
        for _ in range(2000):
            call.say(b"x")
        return 0

    with Sshd(program) as server:
        outcome = attacked(
            server.port,
            key_file(tmp_path),
            server.host_key,
            timeout_seconds=BOUND_SECONDS,
            stdin_bytes=1 << 20,
            times=10,
        )
    assert outcome.error is None, outcome
