"""Reads, copies and checks sparse files, such as machines' memory, without their holes. Standard library only."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

# Large enough that each takes few calls, small enough that few zeros are read beside data.
CHUNK_BYTES = 1 << 16
_ZEROS = bytes(CHUNK_BYTES)


class DamagedError(OSError):
    """A file has other contents than it should.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path.name} is damaged: its contents have changed")


def chunks(file: int) -> Iterator[tuple[int, bytes]]:
    """Yields what is in a file, with offsets: each aligned chunk that has more than zeros.

    So it yields the same whichever zeros the file system keeps as holes.

    Args:
        file: a descriptor, whose position is not used and not kept.

    Raises:
        OSError: it cannot be read.
    """
    end = os.fstat(file).st_size
    offset = 0
    while offset < end:
        try:
            offset = os.lseek(file, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                return
            raise
        hole = os.lseek(file, offset, os.SEEK_HOLE)
        offset -= offset % CHUNK_BYTES
        while offset < hole:
            data = os.pread(file, CHUNK_BYTES, offset)
            if data != _ZEROS[: len(data)]:
                yield offset, data
            offset += CHUNK_BYTES


def digest(path: Path) -> str:
    """Returns a hash of a file's contents and size: SHA-256 of its chunks, each with its offset.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return digest_of(file.fileno())


def digest_of(file: int) -> str:
    """Returns the same of an open file, whose position stays as it is.

    Args:
        file: a descriptor.

    Raises:
        OSError: it cannot be read.
    """
    position = os.lseek(file, 0, os.SEEK_CUR)
    try:
        return _digest(file, None)
    finally:
        os.lseek(file, position, os.SEEK_SET)


def copy(source: Path, target: int) -> str:
    """Copies a file into an empty one, holes as holes, and returns the digest of what was copied.

    Args:
        source: the file.
        target: a descriptor.

    Raises:
        OSError: it cannot be read, or there is no room for it.
    """
    with source.open("rb") as file:
        os.truncate(target, os.fstat(file.fileno()).st_size)
        return _digest(file.fileno(), target)


def _digest(source: int, target: int | None) -> str:
    contents = hashlib.sha256(os.fstat(source).st_size.to_bytes(8))
    for offset, data in chunks(source):
        contents.update(offset.to_bytes(8))
        contents.update(data)
        if target is not None:
            _write(target, data, offset)
    return contents.hexdigest()


def _write(target: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(target, data, offset)
        data, offset = data[written:], offset + written
