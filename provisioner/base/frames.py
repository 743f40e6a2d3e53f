"""Builds frames for machines, and splits what they send into frames.

A frame is a kind (1 byte), the payload's length (4 bytes, big-endian) and the payload. The machine is not trusted: each
frame is checked before its payload has arrived. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

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
