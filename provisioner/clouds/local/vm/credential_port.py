"""Answers a machine that asks for its credentials and for the time, on its virtio-serial port. Standard library only.

Root in the machine may write to the port what it likes, and read nothing from it. A question is one byte, so nothing is
parsed; questions that have come together get one answer; a machine that asks too often is not heard for a while; and no
answer is begun before the last was taken whole.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from provisioner.base import unix_socket
from provisioner.clouds.local.vm import qemu

# In the machine's directory: what the machine gets; and that it has taken it, ever.
CREDENTIALS, TAKEN = "credentials", "credentials.taken"
# What a machine may ask (credentials.pl).
WANTS_CREDENTIALS, WANTS_TIME, HAS_THEM = b"?"[0], b"t"[0], b"."[0]
# The machine refuses a longer message.
MAXIMUM_BYTES = 1 << 20
SEED_BYTES = 64
# What is read at once. A machine asks ten times a second until it is answered, and the host may be busy.
TOGETHER_BYTES = 4096
# A machine that starts asks up to about thirty times: a few times for its credentials, up to twenty times for the time
# (credentials.pl), and up to five times more (clock.pl). What was read at once counts as one question.
QUESTIONS, QUESTIONS_PER_SECOND = 40.0, 2.0


class TooLongError(Exception):
    """The credentials do not fit into a message."""


def message(values: Mapping[str, bytes]) -> bytes:
    """Returns the message that gives a machine its credentials. Pure.

    Raises:
        TooLongError: they are too long.
    """
    records = [f"{name} {len(value)}\n".encode() + value for name, value in sorted(values.items())]
    body = b"".join([*records, b"end 0\n"])
    if len(body) > MAXIMUM_BYTES - 100:
        raise TooLongError(f"the machine's credentials have {len(body)} bytes, more than {MAXIMUM_BYTES}")
    return _answer("credentials", body)


def _answer(kind: str, body: bytes) -> bytes:
    return f"{kind} {len(body)}\n".encode() + body


class CredentialPort:
    """The host's end of one machine's port. Never waits.

    Args:
        directory: the machine's.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket: socket.socket | None = None
        self._answer = b""
        self._questions = QUESTIONS
        self._counted_at = time.monotonic()

    def waits_for(self) -> tuple[list[socket.socket], list[socket.socket]]:
        """Returns the sockets whose readiness to be read, and to be written, calls for `serve`."""
        if self._socket is None:
            return [], []
        if self._answer:
            return [], [self._socket]
        return ([self._socket], []) if self._may_ask() else ([], [])

    def _may_ask(self) -> bool:
        now = time.monotonic()
        self._questions = min(QUESTIONS, self._questions + (now - self._counted_at) * QUESTIONS_PER_SECOND)
        self._counted_at = now
        return self._questions >= 1

    def connect(self) -> bool:
        """Returns whether there is a connection, after an attempt to make one."""
        if self._socket is None:
            client = socket.socket(socket.AF_UNIX)
            client.setblocking(False)
            try:
                unix_socket.connect(client, self._directory / qemu.PORT)
            except OSError:
                client.close()
                return False
            self._socket, self._answer = client, b""
        return True

    def close(self) -> None:
        """Closes the connection; `connect` makes a new one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def serve(self) -> None:
        """Reads questions and answers them, as far as that is possible without waiting."""
        if self._socket is None:
            return
        try:
            if not self._answer and self._may_ask():
                asked = self._socket.recv(TOGETHER_BYTES)
                if not asked:
                    self.close()
                    return
                self._questions -= 1
                self._answer = self._answers(set(asked))
            if self._answer:
                sent = self._socket.send(self._answer)
                self._answer = self._answer[sent:]
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def _answers(self, asked: set[int]) -> bytes:
        if HAS_THEM in asked:
            with contextlib.suppress(OSError):  # the machine is being destroyed
                (self._directory / TAKEN).touch()
        if WANTS_CREDENTIALS in asked:
            try:
                values = {path.name: path.read_bytes() for path in (self._directory / CREDENTIALS).iterdir()}
            except OSError:  # the machine is being destroyed
                return b""
            return message(values | {"seed": secrets.token_bytes(SEED_BYTES)})
        if WANTS_TIME in asked:
            return _answer("time", f"{time.time_ns():019d}".encode())
        return b""
