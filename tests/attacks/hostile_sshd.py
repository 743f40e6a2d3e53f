"""Servers that play a machine whose sshd was replaced, and the measuring of what they cost a controller."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko
from paramiko.common import byte_chr

from provisioner.ssh.keys import ed25519_key_pair
from tests.command_line import ROOT
from tests.unit.fakes.exec_call import Call
from tests.unit.fakes.sshd import Program, Sshd
from tests.waiting import BOUND_SECONDS

MEMORY_MIB = 64
"""The most that any of these servers may cost the controller."""


@dataclass(frozen=True)
class Outcome:
    """What became of a connection to a hostile server.

    Args:
        error: the error's class; None if the command succeeded.
        kinds: the names of its classes.
        message: what the operator reads.
        mib: how much memory the controller needed for it, at its peak.
    """

    error: str | None
    kinds: tuple[str, ...]
    message: str
    mib: float


def attacked(
    port: int,
    key: Path,
    host_key: str,
    timeout_seconds: float = 5,
    stdin_bytes: int = 0,
    times: int = 1,
    answer_seconds: float | None = None,
) -> Outcome:
    """Connects a controller in a process of its own to a server, runs a command there, and returns what became of it.

    Args:
        answer_seconds: the time for each answer of sshd itself, if there shall be none; None for the usual one.
        times: how often it runs the command.
    """
    request = {
        "port": port,
        "key": str(key),
        "host_key": host_key,
        "timeout_seconds": timeout_seconds,
        "stdin_bytes": stdin_bytes,
        "times": times,
        "answer_seconds": answer_seconds,
    }
    argv = [sys.executable, "-m", "tests.attacks.ssh_client", json.dumps(request)]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_SECONDS, check=False)
    assert ended.stdout, ended.stderr[-2000:]
    said: dict[str, Any] = json.loads(ended.stdout)
    outcome = Outcome(said["error"], tuple(said.get("kinds", ())), said["message"], said["mib"])
    print(f"{outcome.mib:6.1f} MiB {said['seconds']:5.1f} s  {outcome.error}: {outcome.message}")
    return outcome


@contextlib.contextmanager
def logged_in(program: Program) -> Iterator[Sshd]:
    """Runs a server that lets the controller log in, and answers its command with the attack."""
    server = Sshd(program)
    try:
        yield server
    finally:
        with contextlib.suppress(Exception):  # attacks end with whatever paramiko raises when the controller leaves
            server.close()


@contextlib.contextmanager
def before_login(attack: Callable[[socket.socket], None]) -> Iterator[int]:
    """Listens on a port that it yields, and attacks each client before its login."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(stream: socket.socket) -> None:
            with stream, contextlib.suppress(OSError):
                attack(stream)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    stream, _ = listener.accept()
                    threading.Thread(target=serve, args=(stream,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(BOUND_SECONDS)


def rest(call: Call) -> None:
    """Says no more for as long as the server is there."""
    assert call.channel.transport is not None
    server: Any = call.channel.transport.server_object
    server._sshd.over.wait(BOUND_SECONDS)


def key_file(directory: Path) -> Path:
    """Writes a private key for the controller."""
    path = directory / "key"
    path.write_text(ed25519_key_pair().private)
    return path


def message(kind: int, *fields: int | bytes | bool) -> paramiko.Message:
    """Returns a message with a number, string or boolean per field."""
    built = paramiko.Message()
    built.add_byte(byte_chr(kind))
    for field in fields:
        if isinstance(field, bool):
            built.add_boolean(field)
        elif isinstance(field, int):
            built.add_int(field)
        else:
            built.add_string(field)
    return built


def send(call: Call, sent: paramiko.Message) -> None:
    """Sends a message without regard to what SSH allows."""
    assert call.channel.transport is not None
    call.channel.transport._send_message(sent)  # type: ignore[attr-defined]


def announce(call: Call, length: int) -> None:
    """Sends the beginning of a packet whose length field says `length`, encrypted as it should be."""
    assert call.channel.transport is not None
    packetizer: Any = call.channel.transport.packetizer
    packetizer._build_packet = lambda _: struct.pack(">IB", length, 4) + bytes(11)
    packetizer.send_message(message(2, b""))
