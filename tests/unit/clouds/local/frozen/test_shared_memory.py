"""One sealed copy of a template's memory for all machines that resume from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from provisioner.clouds.local.frozen import shared_memory, sparse_files

MIB = 1 << 20
HOLDER = "import sys; print('holding', flush=True); sys.stdin.read()"


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A sparse file: a page, a hole, a page, a hole."""
    path = tmp_path / "memory"
    with path.open("wb") as file:
        file.write(b"a" * 4096)
        file.seek(2 * MIB)
        file.write(b"b" * 4096)
        file.truncate(5 * MIB)
    return path


def opened(memory: Path) -> int:
    return shared_memory.opened(memory, memory.with_name("holders"), sparse_files.digest(memory))


def inode(descriptor: int) -> int:
    return os.fstat(descriptor).st_ino


def test_the_copy_is_the_same_and_its_holes_take_no_memory(memory: Path) -> None:
    copy = opened(memory)
    assert os.pread(copy, 6 * MIB, 0) == memory.read_bytes()
    assert os.fstat(copy).st_blocks * 512 < MIB
    os.close(copy)


def test_a_copy_that_a_living_process_holds_is_shared(memory: Path) -> None:
    holders = memory.with_name("holders")
    copy = opened(memory)
    first = inode(copy)
    argv = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(argv, pass_fds=[copy], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"holding\n"
        shared_memory.add_holder(holders, holder.pid, copy)
        os.close(copy)  # what this process held open is gone
        other = os.memfd_create("something else")  # under the same number, perhaps
        again = opened(memory)
        assert inode(again) == first
        os.close(again)
        holder.communicate()
    new = opened(memory)
    assert inode(new) != first
    assert os.pread(new, 6 * MIB, 0) == memory.read_bytes()
    os.close(new)
    os.close(other)


def test_a_copy_of_a_deleted_template_is_not_reused(memory: Path) -> None:
    holders = memory.with_name("holders")
    old = opened(memory)
    holders.unlink()
    new = memory.with_name("new")
    new.write_bytes(b"n" * memory.stat().st_size)
    new.replace(memory)
    shared_memory.add_holder(holders, os.getpid(), old)  # a machine that had begun to resume from the old one
    copy = opened(memory)
    assert os.pread(copy, 4096, 0) == b"n" * 4096
    os.close(copy)
    os.close(old)


def test_an_older_copy_of_changed_memory_still_serves(memory: Path) -> None:
    holders, digest = memory.with_name("holders"), sparse_files.digest(memory)
    copy = shared_memory.opened(memory, holders, digest)
    status = memory.stat()
    with memory.open("r+b") as file:
        file.seek(2 * MIB)
        file.write(b"c")
    os.utime(memory, ns=(status.st_atime_ns, status.st_mtime_ns))  # a disk that fails changes no time
    again = shared_memory.opened(memory, holders, digest)
    assert os.pread(again, 1, 2 * MIB) == b"b"
    os.close(again)
    os.close(copy)
    with pytest.raises(sparse_files.DamagedError, match="memory is damaged"):
        shared_memory.opened(memory, holders, digest)


@pytest.mark.parametrize("text", ["", "[", "[[1]]", '[["x", "y", "z"]]', "{}", '[[1, "0", 0]]'])
def test_a_damaged_or_old_list_of_holders_names_no_process(memory: Path, text: str) -> None:
    holders = memory.with_name("holders")
    holders.write_text(text)
    copy = opened(memory)
    assert os.pread(copy, 1, 0) == b"a"
    [(pid, _, number)] = json.loads(holders.read_text())
    assert (pid, number) == (os.getpid(), copy)
    os.close(copy)
