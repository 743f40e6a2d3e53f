"""An attacker that breaks out of one QEMU tries to write into the memory that all machines of its template start from.

QEMU holds a descriptor that was opened to read and write, so every way to write through it is tried.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from provisioner.clouds.local.frozen import memory_files

MIB = 1 << 20
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2


def punch(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_longlong
    if libc.fallocate(descriptor, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, size(0), size(4096)) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


def map_shared(descriptor: int) -> None:
    mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def make_writable_later(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    length = ctypes.c_size_t(4096)
    address = ctypes.c_void_p(libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, ctypes.c_long(0)))
    try:
        if libc.mprotect(address, length, mmap.PROT_READ | mmap.PROT_WRITE) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    finally:
        libc.munmap(address, length)


def unseal(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0)
    os.pwrite(descriptor, b"x", 0)


@pytest.mark.parametrize(
    "write",
    [
        lambda descriptor: os.pwrite(descriptor, b"x", 0),
        lambda descriptor: os.ftruncate(descriptor, 0),
        lambda descriptor: os.ftruncate(descriptor, 2 * MIB),
        punch,
        map_shared,
        make_writable_later,
        unseal,
    ],
    ids=["write", "shorten", "lengthen", "punch", "map", "protect", "unseal"],
)
@pytest.mark.parametrize("again", [False, True], ids=["inherited", "opened again"])
def test_what_machines_start_from_cannot_be_changed(
    tmp_path: Path, write: Callable[[int], object], again: bool
) -> None:
    memory = tmp_path / "memory"
    memory.write_bytes(b"a" * MIB)
    copy = memory_files.opened(memory, tmp_path / "holders", memory_files.digest(memory))
    descriptor = os.open(f"/proc/self/fd/{copy}", os.O_RDWR) if again else copy
    with pytest.raises(OSError, match=r"fallocate|mprotect|Operation not permitted|Permission denied"):
        write(descriptor)
    assert os.pread(copy, 2 * MIB, 0) == memory.read_bytes() == b"a" * MIB
    for each in {copy, descriptor}:
        os.close(each)


def test_what_one_machine_writes_stays_its_own(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.write_bytes(b"a" * MIB)
    copy = memory_files.opened(memory, tmp_path / "holders", memory_files.digest(memory))
    with (
        mmap.mmap(copy, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as one,
        mmap.mmap(copy, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as other,
    ):
        one[:4096] = b"x" * 4096
        assert other[:4096] == b"a" * 4096
    os.close(copy)
