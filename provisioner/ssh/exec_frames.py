"""Builds requests to a machine's exec server and checks its answers, frame by frame.

guest/provisioner_guest/exec/call.py is the other side. The machine is not trusted: kinds, order, lengths and contents
are bounded here, and nothing is kept but the last frame. Pure.

A frame is a kind (1 byte), the payload's length (4 bytes, big-endian) and the payload.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from provisioner.base import strict_json
from provisioner.base.printable import printable

HEADER = struct.Struct(">cI")


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    """Returns a frame."""
    return HEADER.pack(kind, len(payload)) + payload


class Frames:
    """Holds the beginning of a frame until the rest arrives.

    Args:
        require_expected: called with the kind and the length in bytes of each frame before its payload has arrived.
            Raises if the machine may not send such a frame now.
    """

    def __init__(self, require_expected: Callable[[bytes, int], None]) -> None:
        self._require_expected = require_expected
        self._buffer = bytearray()

    @property
    def is_between(self) -> bool:
        """Whether nothing has arrived of a further frame."""
        return not self._buffer

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Adds a piece of the stream, and yields the kind and the payload of each frame that it completes.

        A piece is added only once the result is iterated. A frame that is not taken is yielded by the next call.
        """
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            kind, length = HEADER.unpack_from(self._buffer)
            self._require_expected(kind, length)
            end = HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            yield kind, payload


REQUEST, STDIN, STDIN_END = b"q", b"i", b"z"
STARTED, STDOUT, STDERR, ALIVE, EXIT = b"s", b"o", b"e", b"a", b"x"
# Linux takes 2 MiB of arguments and environment in all. In JSON a byte may take six.
REQUEST_LIMIT_BYTES = 16 << 20
DATA_LIMIT_BYTES = 64 << 10
EXIT_LIMIT_BYTES = 8 << 10
# Of an explanation why something could not start.
TEXT_CHARACTERS = 1000
LARGEST_ERRNO = 4095
_LIMITS = {STARTED: 0, STDOUT: DATA_LIMIT_BYTES, STDERR: DATA_LIMIT_BYTES, ALIVE: 0, EXIT: EXIT_LIMIT_BYTES}
# An honest server gives a sign of life every ten seconds.
ALIVE_AT_ONCE = 10
ALIVE_PER_SECOND = 1.0

Stream = Literal["stdout", "stderr"]


class ExecViolation(Exception):
    """The machine sent what its exec server never does."""


@dataclass(frozen=True)
class CallEnd:
    """How a call ended, by the machine's account.

    Args:
        code: the exit code, 128+n if signal n ended it; None if it did not start, or not end in time.
        errno: why it did not start; None if it did.
        what: what could not be had: user, directory, program, file or process.
        text: the machine's explanation, printable.
        timed_out: whether the machine ended it at its time limit.
    """

    code: int | None = None
    errno: int | None = None
    what: str = ""
    text: str = ""
    timed_out: bool = False


def request(
    operation: str,
    *,
    user: str,
    argv: Sequence[str] = ("",),
    cwd: str | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float | None = None,
    **more: str | int | bool,
) -> bytes:
    """Returns the frame that asks for a call.

    Raises:
        ValueError: it is larger than any machine could take.
    """
    body = {
        "operation": operation,
        "user": user,
        "argv": list(argv),
        "cwd": cwd,
        "environment": dict(environment or {}),
        "timeout_seconds": timeout_seconds,
        **more,
    }
    encoded = json.dumps(body).encode("ascii")
    if len(encoded) > REQUEST_LIMIT_BYTES:
        raise ValueError(f"a command has more than {REQUEST_LIMIT_BYTES >> 20} MiB of arguments")
    return frame(REQUEST, encoded)


class Answers:
    """Takes the bytes of one call in pieces.

    Attributes:
        started: whether the machine has said that the command began.
        end: how it ended; None until then.
    """

    def __init__(self) -> None:
        self._frames = Frames(self._require_expected)
        self._alive = 0
        self._seconds = 0.0
        self.started = False
        self.end: CallEnd | None = None

    def feed(self, data: bytes, seconds: float) -> Iterator[tuple[Stream, bytes]]:
        """Takes a piece and yields the output in it.

        Args:
            seconds: how long the call has lasted.

        Raises:
            ExecViolation: the machine sent something else than an exec server may.
        """
        self._seconds = seconds
        for kind, payload in self._frames.feed(data):
            if kind == EXIT:
                self.end = _parse_end(payload, self.started)
            elif kind == STDOUT:
                yield "stdout", payload
            elif kind == STDERR:
                yield "stderr", payload
            elif kind == STARTED:
                self.started = True
            else:
                self._alive += 1

    def _require_expected(self, kind: bytes, length: int) -> None:
        if self.end:
            raise ExecViolation("something follows the end of a command")
        if length > _LIMITS.get(kind, -1):
            raise ExecViolation("a frame is of no known kind or too long")
        if kind == STARTED and self.started:
            raise ExecViolation("a command starts twice")
        if kind in (STDOUT, STDERR) and not (self.started and length):
            raise ExecViolation("output comes before the command starts, or is empty")
        if kind == ALIVE and self._alive > ALIVE_AT_ONCE + self._seconds * ALIVE_PER_SECOND:
            raise ExecViolation("signs of life never cease")


def _parse_end(payload: bytes, started: bool) -> CallEnd:
    """Checks how a call ended; raises ExecViolation if no command can end so."""
    try:
        said = strict_json.parse(payload, maximum_values=20)
    except strict_json.NotStrictJsonError as error:
        raise ExecViolation("the end of a command is not JSON") from error
    match said:
        case {"code": int(code), **more} if started and not more and type(code) is int and 0 <= code <= 255:
            return CallEnd(code=code)
        case {"timed_out": True, **more} if not more:
            return CallEnd(timed_out=True)
        case {"errno": int(number), "what": str(what), "text": str(text), **more} if (
            not more and type(number) is int and 0 < number <= LARGEST_ERRNO and len(what) < 20
        ):
            return CallEnd(errno=number, what=printable(what), text=printable(text[:TEXT_CHARACTERS]))
    raise ExecViolation("a command cannot end as it says")
