"""Copies and checks machines' memory, which are sparse files, and shares one copy of a template's among machines.

QEMU 7.2 insists on a file that it may write, and an attacker in QEMU must not write into other machines. So it
gets a copy in memory that the kernel has sealed. The watchdogs of the machines keep it open; the next machine finds it
with one of them. The copy is gone with the last. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from provisioner.clouds.local.vm.processes import start_time
from provisioner.store.files import write_atomically

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


SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def opened(memory: Path, holders: Path, digest: str) -> int:
    """Returns a descriptor of a sealed copy of a template's memory, of which this process is a holder from now on.

    To be called under the template's lock, as `add_holder`.

    Args:
        memory: the template's memory.
        holders: file that names the processes that have a copy open.
        digest: what the memory's contents have to be, as `digest` returns it. A copy was checked when it was made.

    Raises:
        DamagedError: its contents are others.
        OSError: it cannot be copied.
    """
    descriptor = _open_copy(holders, memory.stat().st_size, _name(memory))
    if descriptor is None:
        descriptor = _copied(memory, digest)
    add_holder(holders, os.getpid(), descriptor)
    return descriptor


def add_holder(holders: Path, pid: int, descriptor: int) -> None:
    """Notes that a process of ours has the copy open, and forgets those that have ended."""
    known = [each for each in _read(holders) if start_time(each[0]) == each[1]]
    write_atomically(holders, json.dumps([*known, (pid, start_time(pid), descriptor)]))


def _read(holders: Path) -> list[tuple[int, str, int]]:
    try:
        return [(int(pid), str(started), int(number)) for pid, started, number in json.loads(holders.read_bytes())]
    except (OSError, ValueError, TypeError):
        return []


def _name(memory: Path) -> str:
    """Returns the name of a copy of this file, and of no other that was here before or will be."""
    status = memory.stat()
    return f"machine-{status.st_dev:x}-{status.st_ino}-{status.st_mtime_ns}"


def _open_copy(holders: Path, size: int, name: str) -> int | None:
    """Opens the copy that a living process holds open; None if there is none."""
    for pid, started, number in reversed(_read(holders)):
        with contextlib.suppress(OSError):
            descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            # Looked at after it was opened: until then the process may have ended, and its number be another's.
            if start_time(pid) == started and _is_copy(descriptor, size, name):
                return descriptor
            os.close(descriptor)
    return None


def _is_copy(descriptor: int, size: int, name: str) -> bool:
    try:
        if str(Path(f"/proc/self/fd/{descriptor}").readlink()) != f"/memfd:{name} (deleted)":
            return False  # of a template that was here before
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) == SEALS and os.fstat(descriptor).st_size == size
    except OSError:  # no file in memory
        return False


def _copied(memory: Path, digest: str) -> int:
    descriptor = os.memfd_create(_name(memory), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        if copy(memory, descriptor) != digest:
            raise DamagedError(memory)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
