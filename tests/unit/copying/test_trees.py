"""Tests what writes a machine's file tree. test_transfer.py reads honest trees, and tests/attacks the others."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.copying import trees
from provisioner.copying.trees import DiskFullError, TreeError, TreeWriter


@pytest.fixture
def top(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_tree_is_written_and_everything_closed(top: int, tmp_path: Path) -> None:
    before = descriptors()
    with TreeWriter(top) as writer:
        writer.begin_directory("")
        writer.begin_file("file", executable=True)
        writer.write(b"con")
        writer.write(b"tent")
        writer.end_file()
        writer.begin_directory("deep")
        writer.begin_file("unfinished", executable=False)
    assert (tmp_path / "payload" / "file").read_text() == "content"
    assert (tmp_path / "payload" / "deep" / "unfinished").exists()
    assert descriptors() == before


@pytest.mark.parametrize("first", ["directory", "file", "link"])
def test_nothing_that_exists_is_touched(top: int, tmp_path: Path, first: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    if first == "directory":
        (tmp_path / "payload").mkdir()
    elif first == "file":
        (tmp_path / "payload").touch()
    else:
        (tmp_path / "payload").symlink_to(outside)
    with TreeWriter(top) as writer, pytest.raises(TreeError, match="comes twice"):
        writer.begin_directory("")
    with TreeWriter(top) as writer, pytest.raises(TreeError, match="comes twice"):
        writer.begin_file("", executable=False)
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=["disk", "quota", "broken"])
def test_a_failure_to_write_is_ours_to_explain(top: int, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    expected = TreeError if number == errno.EIO else DiskFullError
    with TreeWriter(top) as writer:
        writer.begin_file("", executable=False)
        monkeypatch.setattr(os, "write", fail)
        with pytest.raises(expected):
            writer.write(b"content")
        monkeypatch.undo()


@pytest.mark.parametrize("what", ["FREE_BYTES", "FREE_INODES"])
def test_space_is_left_on_the_disk(top: int, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    with TreeWriter(top) as writer:
        writer.begin_directory("")
        monkeypatch.setattr(trees, what, 1 << 60)
        monkeypatch.setattr(os, "fstatvfs", lambda file, ask=os.fstatvfs: with_inodes(ask(file)))
        with pytest.raises(DiskFullError):
            make_directories(writer, 2 * trees.BYTES_BETWEEN_CHECKS // trees.WRITTEN_ENTRY_BYTES)


def make_directories(writer: TreeWriter, count: int) -> None:
    for number in range(count):
        writer.begin_directory(str(number))
        writer.end_directory()


def with_inodes(disk: os.statvfs_result) -> os.statvfs_result:
    """Returns a disk that has a number of inodes, as not all file systems do."""
    return os.statvfs_result((*disk[:5], 10**6, 10**6, 10**6, *disk[8:]))
