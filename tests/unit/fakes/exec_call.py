"""One call of an exec server, as a test plays it, or as the real server carries it out here."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shlex
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

import paramiko

from provisioner.clouds.guest_files import GUEST
from provisioner.ssh.exec_frames import EXIT, HEADER, REQUEST, STARTED, STDERR, STDIN, STDIN_END, STDOUT, frame

# The real server, without cgroups: those of this host are not for tests.
SERVER = f"""
import sys
sys.path.insert(0, {str(GUEST)!r})
from provisioner_guest import cgroup
cgroup.ROOT = "/nonexistent"
import exec_server
exec_server.serve(0, 1)
"""
# The Python of the machine. scripts/other-pythons names the oldest that an image has.
GUEST_PYTHON = os.environ.get("PROVISIONER_TEST_GUEST_PYTHON", sys.executable)
PIECE_BYTES = 1 << 15


class Call:
    """Reads a request from a channel, and answers.

    Attributes:
        request: all of it.
        user, argv, program: from it.
        command: the arguments as one text.
        channel: the channel to the client.
    """

    def __init__(self, channel: paramiko.Channel) -> None:
        self.channel = channel
        kind, payload = self.receive()
        assert kind == REQUEST
        self.request: dict[str, Any] = json.loads(payload)
        self.user, self.argv = self.request["user"], self.request["argv"]
        self.program = self.request.get("program")
        self.command = shlex.join(self.argv)
        self._is_started = False

    def receive(self) -> tuple[bytes, bytes]:
        """Receives a frame.

        Raises:
            EOFError: the client has gone.
        """
        kind, length = HEADER.unpack(self._read(HEADER.size))
        return kind, self._read(length)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            if not (piece := self.channel.recv(size - len(data))):
                raise EOFError
            data += piece
        return data

    def stdin(self) -> bytes:
        """Receives the client's input to its end."""
        pieces: list[bytes] = []
        while True:
            kind, payload = self.receive()
            if kind == STDIN_END:
                return b"".join(pieces)
            assert kind == STDIN
            pieces.append(payload)

    def start(self) -> None:
        """Says that the command began, once."""
        if not self._is_started:
            self._is_started = True
            self.channel.sendall(frame(STARTED))

    def say(self, stdout: bytes = b"", stderr: bytes = b"") -> None:
        """Sends output."""
        self.start()
        for kind, data in ((STDOUT, stdout), (STDERR, stderr)):
            for begin in range(0, len(data), PIECE_BYTES):
                self.channel.sendall(frame(kind, data[begin : begin + PIECE_BYTES]))

    def end(self, code: int | None) -> None:
        """Says how the command ended; None if another has."""
        if code is not None:
            self.start()
            self.channel.sendall(frame(EXIT, json.dumps({"code": code}).encode()))


def in_a_shell(call: Call, environment: Mapping[str, str] | None = None) -> None:
    """Has the real exec server carry the call out, as this process's user."""
    body = {**call.request, "user": pwd.getpwuid(os.geteuid()).pw_name}
    if environment:
        body |= {"environment": dict(environment), "cwd": environment["HOME"]}
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [GUEST_PYTHON, "-I", "-S", "-B", "-c", SERVER], stdin=theirs.fileno(), stdout=theirs.fileno()
        )
    # Whatever happens, the server is waited for: paramiko says OSError or EOFError of a client that has left.
    with process, ours, contextlib.suppress(OSError, EOFError):
        ours.sendall(frame(REQUEST, json.dumps(body).encode()))
        threading.Thread(target=_feed, args=(call.channel, ours), daemon=True).start()
        while data := ours.recv(PIECE_BYTES):
            call.channel.sendall(data)


def _feed(channel: paramiko.Channel, server: socket.socket) -> None:
    with contextlib.suppress(OSError, EOFError):
        while data := channel.recv(PIECE_BYTES):
            server.sendall(data)
    with contextlib.suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)


def in_bash(channel: paramiko.Channel, command: str) -> None:
    """Runs a command of a session in bash, as sshd does for root."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(["/bin/bash", "-c", command], stdin=theirs.fileno(), stdout=theirs.fileno())
    threading.Thread(target=_feed, args=(channel, ours), daemon=True).start()
    with process, ours, contextlib.suppress(OSError, EOFError):
        while data := ours.recv(PIECE_BYTES):
            channel.sendall(data)
    with contextlib.suppress(OSError, EOFError):
        channel.send_exit_status(process.wait())
        channel.close()


def header(kind: bytes, length: int) -> bytes:
    """Returns the beginning of a frame of any length."""
    return struct.pack(">cI", kind, length)
