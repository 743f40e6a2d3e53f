"""Bounds how much of a machine's output is kept, so that endless output does not fill the controller's memory."""

from __future__ import annotations

from dataclasses import dataclass

OUTPUT_LIMIT_BYTES = 8 << 20


@dataclass(frozen=True)
class StreamSize:
    """Says how long a stream of output was.

    Args:
        total_bytes: all that the command wrote.
        cut_bytes: how many of these were not kept; 0 if the output is complete.
    """

    total_bytes: int = 0
    cut_bytes: int = 0


NO_OUTPUT = StreamSize()


class BoundedBuffer:
    """Keeps the beginning and the end of the data that is written to it, and marks the cut between them.

    Args:
        limit_bytes: how many bytes are kept.
        beginning_bytes: how many of them from the beginning; None for half of them.
    """

    def __init__(self, limit_bytes: int = OUTPUT_LIMIT_BYTES, *, beginning_bytes: int | None = None) -> None:
        self._beginning = max(1, limit_bytes // 2) if beginning_bytes is None else beginning_bytes
        self._end = max(1, limit_bytes // 2) if beginning_bytes is None else limit_bytes - beginning_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._cut = self._total = 0

    def write(self, data: bytes) -> None:
        """Appends data."""
        self._total += len(data)
        room = self._beginning - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._end:
            self._trim()

    def _trim(self) -> None:
        surplus = len(self._tail) - self._end
        if surplus > 0:
            self._cut += surplus
            del self._tail[:surplus]

    @property
    def size(self) -> StreamSize:
        """How much was written, and how much of it `value` lacks."""
        self._trim()
        return StreamSize(self._total, self._cut)

    def value(self) -> bytes:
        """Returns the data that was kept."""
        self._trim()
        mark = b"\n[... %d bytes cut out ...]\n" % self._cut if self._cut else b""
        return bytes(self._head) + mark + bytes(self._tail)
