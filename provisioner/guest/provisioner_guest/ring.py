"""Keeps the end of a stream in a file of bounded size, which one process writes while others read it."""

from __future__ import annotations

import os

HEADER_BYTES = 8
CAPACITY_BYTES = 8 << 20
# The most that is written or read at once.
CHUNK_BYTES = 64 << 10


class Ring:
    """Holds the last bytes of a stream, after the count of all bytes that were ever written.

    Args:
        descriptor: of the file, open for reading, and for writing if `write` is called.
        capacity_bytes: how much of the stream the file holds; more than two chunks.
    """

    def __init__(self, descriptor: int, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self.descriptor = descriptor
        self.capacity_bytes = capacity_bytes

    def total(self) -> int:
        """Return how many bytes were written since the beginning."""
        return int.from_bytes(os.pread(self.descriptor, HEADER_BYTES, 0), "little")

    def write(self, data: bytes) -> None:
        """Append a chunk, over the oldest data. The data is written before it is counted.

        Raises:
            OSError: the disk is full.
        """
        total = self.total()
        position = total % self.capacity_bytes
        room = self.capacity_bytes - position
        os.pwrite(self.descriptor, data[:room], HEADER_BYTES + position)
        if data[room:]:
            os.pwrite(self.descriptor, data[room:], HEADER_BYTES)
        os.pwrite(self.descriptor, (total + len(data)).to_bytes(HEADER_BYTES, "little"), 0)

    def read(self, offset: int) -> tuple[int, bytes]:
        """Read at most a chunk, from an offset in the stream or from the oldest byte that is surely left.

        Returns:
            the offset of the data, and the data; empty if nothing was written since.
        """
        while True:
            offset = max(offset, self._oldest())
            position = offset % self.capacity_bytes
            size = min(CHUNK_BYTES, self.total() - offset, self.capacity_bytes - position)
            if size <= 0:
                return offset, b""
            data = os.pread(self.descriptor, size, HEADER_BYTES + position)
            if offset >= self._oldest():  # the writer has not come round in the meantime
                return offset, data

    def _oldest(self) -> int:
        """Return the offset of the first byte that the writer does not overwrite just now."""
        return max(0, self.total() + CHUNK_BYTES - self.capacity_bytes)
