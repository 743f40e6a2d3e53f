"""Tests that files are written completely or not at all, and that trees are removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from provisioner.store.files import disk_bytes, read_end, remove_tree, write_atomically


def test_a_file_is_replaced_completely_and_private(tmp_path: Path) -> None:
    path = tmp_path / "record"
    write_atomically(path, "old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record"
    write_atomically(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_tree_is_removed_and_a_missing_one_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "deep").chmod(0o500)
    remove_tree(tmp_path / "tree")
    remove_tree(tmp_path / "tree")
    assert list(tmp_path.iterdir()) == []


def test_a_tree_is_removed_while_another_process_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    rmdir = os.rmdir
    late = ["record", "log"]

    def rmdir_after_a_write(path: str | Path, *, dir_fd: int | None = None) -> None:
        if late:
            (tree / late.pop()).write_text("late")
        rmdir(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", rmdir_after_a_write)
    remove_tree(tree)
    assert (late, tree.exists()) == ([], False)


@pytest.mark.parametrize(("limit", "end"), [(3, b"def"), (6, b"abcdef"), (99, b"abcdef")])
def test_the_end_of_a_file_is_read(tmp_path: Path, limit: int, end: bytes) -> None:
    (tmp_path / "log").write_bytes(b"abcdef")
    assert read_end(tmp_path / "log", limit) == end
    assert read_end(tmp_path / "missing", limit) == b""


def test_the_size_of_a_changing_tree_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kept", "gone"):
        (tmp_path / "deep").mkdir(exist_ok=True)
        (tmp_path / "deep" / name).write_bytes(b"x" * 8192)
    lstat = os.lstat

    def lstat_while_one_goes(path: Path) -> os.stat_result:
        (tmp_path / "deep" / "gone").unlink(missing_ok=True)
        return lstat(path)

    monkeypatch.setattr(os, "lstat", lstat_while_one_goes)
    assert disk_bytes(tmp_path) == (tmp_path / "deep" / "kept").stat().st_blocks * 512 > 0
