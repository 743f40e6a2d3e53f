"""Cuts a stream into the exec server's frames: kind (1 byte), payload's length (4 bytes, big-endian), payload.

ssh/exec_frames.py is the controller's side. From Python 3.8 on, as all of the exec server.
"""

from __future__ import annotations

import json
import struct

HEADER = struct.Struct(">cI")
# From the controller: what to do (JSON, once, first), input, and the input's end (without a payload).
REQUEST, STDIN, STDIN_END = b"q", b"i", b"z"
# To the controller: it began, output, a sign of life, and how it ended (JSON, once, last).
STARTED, STDOUT, STDERR, ALIVE, EXIT = b"s", b"o", b"e", b"a", b"x"
REQUEST_BYTES = 16 << 20
DATA_BYTES = 64 << 10
LIMITS = {REQUEST: REQUEST_BYTES, STDIN: DATA_BYTES, STDIN_END: 0}


class BadFrameError(Exception):
    """The controller sent something that is no frame."""


class Frames:
    """Takes a stream in pieces and gives whole frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Take a piece of the stream."""
        self._buffer += data

    def next(self) -> tuple[bytes, bytes] | None:
        """Return the next frame, its kind and payload; None if it is not complete.

        Raises:
            BadFrameError: no frame has such a kind or length.
        """
        if len(self._buffer) < HEADER.size:
            return None
        kind, length = HEADER.unpack_from(self._buffer)
        if length > LIMITS.get(kind, -1):
            raise BadFrameError("a frame is of no known kind or too long")
        end = HEADER.size + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return kind, payload


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    """Return a frame."""
    return HEADER.pack(kind, len(payload)) + payload


def ended(**how: str | int) -> bytes:
    """Return the frame that says how a call ended: `code`; `timed_out`; or `errno`, `what` and `text`."""
    return frame(EXIT, json.dumps(how).encode("ascii"))
