"""Tests that what is packed for a machine is the same wherever it is packed, and whole."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from provisioner.errors import UsageError
from provisioner.inspect.plain_family import pack


def _tree(directory: Path) -> Path:
    (directory / "empty").mkdir(parents=True)
    (directory / ".git").mkdir()
    (directory / ".git" / "HEAD").write_text("ref")
    (directory / "run.sh").write_text("#!/bin/sh\n")
    (directory / "run.sh").chmod(0o750)
    (directory / "out").symlink_to("/etc/passwd")
    return directory


def test_equal_trees_make_equal_archives_with_everything_in_them(tmp_path: Path) -> None:
    one, other = _tree(tmp_path / "a"), _tree(tmp_path / "b")
    os.utime(other / "run.sh", (1, 1))
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
    first = Path(pack(one, "/opt/context0.tar", tmp_path / "x"))
    second = Path(pack(other, "/opt/context0.tar", tmp_path / "y"))
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as archive:
        members = {member.name: member for member in archive}
    inside = {f"context0/{name}" for name in (".git", ".git/HEAD", "empty", "out", "run.sh")}
    assert set(members) == {"context0", *inside}
    assert members["context0/run.sh"].mode == 0o750
    assert members["context0/out"].linkname == "/etc/passwd"
    assert {member.uid for member in members.values()} == {0}


def test_inspects_logs_are_left_out(tmp_path: Path) -> None:
    before, after = _tree(tmp_path / "a"), _tree(tmp_path / "b")
    (after / "logs").mkdir()
    for name in ("logs/2026_task.eval", "last.eval"):
        (after / name).write_text("the answers")
    for directory in ("x", "y"):
        (tmp_path / directory).mkdir()
    packed = [Path(pack(tree, "/opt/context0.tar", tmp_path / to)) for tree, to in ((before, "x"), (after, "y"))]
    assert packed[0].read_bytes() == packed[1].read_bytes()


def test_a_single_file_is_packed_by_the_archives_name(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("1")
    (tmp_path / "link").symlink_to("data")
    with tarfile.open(pack(tmp_path / "link", "/opt/files1.tar", tmp_path)) as archive:
        assert [(member.name, member.isreg()) for member in archive] == [("files1", True)]


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    os.mkfifo(tmp_path / "tree" / "pipe")
    with pytest.raises(UsageError, match="files0/pipe is neither a file, a directory nor a link"):
        pack(tmp_path / "tree", "files0.tar", tmp_path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="missing cannot be copied: No such file"):
        pack(tmp_path / "missing", "files0.tar", tmp_path)
