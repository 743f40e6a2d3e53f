"""Sparse files are copied and compared by what is in them, and a template's machines share one copy of its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from provisioner.clouds.local.frozen import memory_files
from provisioner.clouds.local.frozen.memory_files import CHUNK_BYTES

MIB = 1 << 20


def sparse(path: Path, size: int, *written: tuple[int, bytes]) -> Path:
    """A file with nothing but holes where nothing is written."""
    with path.open("wb") as file:
        file.truncate(size)
        for offset, data in written:
            file.seek(offset)
            file.write(data)
    return path


def in_memory(size: int = 0) -> int:
    descriptor = os.memfd_create("copy")
    os.truncate(descriptor, size)
    return descriptor


def test_a_copy_has_the_same_contents_size_and_holes(tmp_path: Path) -> None:
    data = (3, b"a"), (CHUNK_BYTES - 1, b"bc"), (2 * MIB, b"d" * 5000), (4 * MIB + 7, b"e")
    source = sparse(tmp_path / "source", 5 * MIB + 11, *data)
    copy = in_memory()
    assert memory_files.copy(source, copy) == memory_files.digest(source)
    assert os.pread(copy, 6 * MIB, 0) == source.read_bytes()
    assert os.fstat(copy).st_blocks * 512 < MIB
    os.close(copy)


def test_zeros_that_are_written_count_as_holes(tmp_path: Path) -> None:
    holes = sparse(tmp_path / "holes", 2 * MIB, (MIB, b"x"))
    zeros = tmp_path / "zeros"
    zeros.write_bytes(holes.read_bytes())
    assert zeros.stat().st_blocks > holes.stat().st_blocks
    assert memory_files.digest(zeros) == memory_files.digest(holes)
    copy = in_memory()
    memory_files.copy(zeros, copy)
    assert os.fstat(copy).st_blocks * 512 < MIB
    os.close(copy)


@pytest.mark.parametrize(
    ("size", "written"),
    [
        (2 * MIB, (MIB, b"y")), (2 * MIB, (MIB + 1, b"x")), (2 * MIB, (0, b"x")), (2 * MIB + 1, (MIB, b"x")),
        (2 * MIB, (0, b"")),
    ],
    ids=["byte", "offset", "chunk", "size", "hole"],
)  # fmt: skip
def test_another_byte_place_or_size_makes_another_digest(tmp_path: Path, size: int, written: tuple[int, bytes]) -> None:
    one = sparse(tmp_path / "one", 2 * MIB, (MIB, b"x"))
    assert memory_files.digest(sparse(tmp_path / "other", size, written)) != memory_files.digest(one)


def test_an_open_file_is_where_it_was_once_it_has_been_hashed(tmp_path: Path) -> None:
    path = sparse(tmp_path / "state", 2 * MIB, (MIB, b"x"))
    with path.open("rb") as file:
        os.lseek(file.fileno(), 7, os.SEEK_SET)
        assert memory_files.digest_of(file.fileno()) == memory_files.digest(path)
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 7


def test_a_file_without_data_and_an_empty_one_are_read(tmp_path: Path) -> None:
    empty, hole = sparse(tmp_path / "empty", 0), sparse(tmp_path / "hole", MIB)
    assert memory_files.digest(empty) != memory_files.digest(hole)
    copy = in_memory()
    memory_files.copy(hole, copy)
    assert os.fstat(copy).st_size == MIB
    os.close(copy)


HOLDER = "import sys; print('holding', flush=True); sys.stdin.read()"


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A sparse file: a page, a hole, a page, a hole."""
    return sparse(tmp_path / "memory", 5 * MIB, (0, b"a" * 4096), (2 * MIB, b"b" * 4096))


def opened(memory: Path) -> int:
    return memory_files.opened(memory, memory.with_name("holders"), memory_files.digest(memory))


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
        memory_files.add_holder(holders, holder.pid, copy)
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
    memory_files.add_holder(holders, os.getpid(), old)  # a machine that had begun to resume from the old one
    copy = opened(memory)
    assert os.pread(copy, 4096, 0) == b"n" * 4096
    os.close(copy)
    os.close(old)


def test_an_older_copy_of_changed_memory_still_serves(memory: Path) -> None:
    holders, digest = memory.with_name("holders"), memory_files.digest(memory)
    copy = memory_files.opened(memory, holders, digest)
    status = memory.stat()
    with memory.open("r+b") as file:
        file.seek(2 * MIB)
        file.write(b"c")
    os.utime(memory, ns=(status.st_atime_ns, status.st_mtime_ns))  # a disk that fails changes no time
    again = memory_files.opened(memory, holders, digest)
    assert os.pread(again, 1, 2 * MIB) == b"b"
    os.close(again)
    os.close(copy)
    with pytest.raises(memory_files.DamagedError, match="memory is damaged"):
        memory_files.opened(memory, holders, digest)


@pytest.mark.parametrize("text", ["", "[", "[[1]]", '[["x", "y", "z"]]', "{}", '[[1, "0", 0]]'])
def test_a_damaged_or_old_list_of_holders_names_no_process(memory: Path, text: str) -> None:
    holders = memory.with_name("holders")
    holders.write_text(text)
    copy = opened(memory)
    assert os.pread(copy, 1, 0) == b"a"
    [(pid, _, number)] = json.loads(holders.read_text())
    assert (pid, number) == (os.getpid(), copy)
    os.close(copy)
