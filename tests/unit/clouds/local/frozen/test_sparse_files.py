"""Sparse files are copied and compared by what is in them, whichever zeros are holes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from provisioner.clouds.local.frozen import sparse_files
from provisioner.clouds.local.frozen.sparse_files import CHUNK_BYTES

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
    assert sparse_files.copy(source, copy) == sparse_files.digest(source)
    assert os.pread(copy, 6 * MIB, 0) == source.read_bytes()
    assert os.fstat(copy).st_blocks * 512 < MIB
    os.close(copy)


def test_zeros_that_are_written_count_as_holes(tmp_path: Path) -> None:
    holes = sparse(tmp_path / "holes", 2 * MIB, (MIB, b"x"))
    zeros = tmp_path / "zeros"
    zeros.write_bytes(holes.read_bytes())
    assert zeros.stat().st_blocks > holes.stat().st_blocks
    assert sparse_files.digest(zeros) == sparse_files.digest(holes)
    copy = in_memory()
    sparse_files.copy(zeros, copy)
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
    assert sparse_files.digest(sparse(tmp_path / "other", size, written)) != sparse_files.digest(one)


def test_an_open_file_is_where_it_was_once_it_has_been_hashed(tmp_path: Path) -> None:
    path = sparse(tmp_path / "state", 2 * MIB, (MIB, b"x"))
    with path.open("rb") as file:
        os.lseek(file.fileno(), 7, os.SEEK_SET)
        assert sparse_files.digest_of(file.fileno()) == sparse_files.digest(path)
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 7


def test_a_file_without_data_and_an_empty_one_are_read(tmp_path: Path) -> None:
    empty, hole = sparse(tmp_path / "empty", 0), sparse(tmp_path / "hole", MIB)
    assert sparse_files.digest(empty) != sparse_files.digest(hole)
    copy = in_memory()
    sparse_files.copy(hole, copy)
    assert os.fstat(copy).st_size == MIB
    os.close(copy)
