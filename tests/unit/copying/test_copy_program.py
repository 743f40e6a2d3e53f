"""Tests the program that copies files inside machines, and what it sends."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from provisioner.base.frames import frame
from provisioner.copying import copy_program
from provisioner.copying.copy_program import END, MAX_DEPTH, PROGRAM, SKIPPED, TreeSender, is_plain_name
from tests.unit.copying.test_unpack_program import archive_of, info
from tests.unit.fakes.copies import directory, file, tree


def sent(path: object) -> bytes:
    out = io.BytesIO()
    TreeSender(out).send(str(path))
    return out.getvalue()


def test_a_tree_is_sent_in_order_with_what_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = tmp_path / "top"
    (top / "b" / "below").mkdir(parents=True)
    (top / "b" / "file").write_text("content")
    (top / "a").write_text("")
    (top / "c").write_text("content")
    (top / "c").chmod(0o700)
    (top / "d").symlink_to("c")
    os.mkfifo(top / "e")
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(top)
        listener.bind("f")
    (top / "g\x1b").mkdir()
    Path(os.fsdecode(bytes(top) + b"/h\xff")).touch()
    assert sent(top) == tree(
        file(b"a", b""),
        directory(b"b", directory(b"below"), file(b"file")),
        file(b"c", kind=PROGRAM),
        *(frame(SKIPPED, name) for name in (b"d", b"e", b"f", b"g\x1b", b"h\xff")),
    )
    assert sent(top / "c") == file(b"", kind=PROGRAM) + frame(END)


def test_a_file_that_grows_is_sent_as_long_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fstat", lambda file, fstat=os.fstat: grown(fstat(file), tmp_path / "file"))
    (tmp_path / "file").write_text("content")
    assert sent(tmp_path / "file") == file(b"") + frame(END)


def grown(status: os.stat_result, path: Path) -> os.stat_result:
    path.write_text("content and more")
    return status


def test_an_entry_that_is_swapped_meanwhile_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gone", "link", "other", "socket"):
        (tmp_path / name).write_text("content")

    def swap(name: str, *args: object, stat: object = os.stat, **options: object) -> os.stat_result:
        status: os.stat_result = stat(name, *args, **options)  # type: ignore[operator]
        if name in ("gone", "link", "other", "socket"):
            (tmp_path / name).unlink()
        if name == "link":
            (tmp_path / name).symlink_to("/etc/passwd")
        if name == "other":
            (tmp_path / name).mkdir()
        if name == "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                monkeypatch.chdir(tmp_path)
                listener.bind(name)
        return status

    monkeypatch.setattr(os, "stat", swap)
    assert sent(tmp_path) == tree(*(frame(SKIPPED, name) for name in (b"gone", b"link", b"other", b"socket")))


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1], ids=["deepest", "deeper"])
def test_a_tree_that_is_nested_too_deeply_is_refused(tmp_path: Path, depth: int) -> None:
    tmp_path.joinpath("d", *["d"] * (depth - 1)).mkdir(parents=True)
    if depth <= MAX_DEPTH:
        assert sent(tmp_path / "d").count(directory(b"d")) == 1
    else:
        with pytest.raises(OSError, match="nested more than"):
            sent(tmp_path / "d")


def test_the_reason_and_the_path_are_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)

    def refuse(name: str, *args: object, open_: object = os.open, **options: object) -> int:
        if name == "c":
            raise PermissionError(13, "Permission denied", name)
        return open_(name, *args, **options)  # type: ignore[operator,no-any-return]

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError) as raised:
        sent(tmp_path / "a")
    assert raised.value.filename == "a/b/c"
    monkeypatch.undo()
    command = [sys.executable, copy_program.__file__, "send", str(tmp_path / "missing")]
    environment = {"PYTHONPATH": str(Path(copy_program.__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "missing: No such file or directory\n")


@pytest.mark.parametrize("name", ["a", " ", "ä", "-rf", "a\\b", "...", "\N{ZERO WIDTH JOINER}", "x" * 255])
def test_a_plain_name_is_copied(name: str) -> None:
    assert is_plain_name(name.encode())


@pytest.mark.parametrize(
    "name", [b"", b".", b"..", b"a/b", b"/", b"\0", b"a\n", b"\x1b]", b"\x7f", b"\xc2\x9b", b"\xff"]
)
def test_another_name_is_not(name: bytes) -> None:
    assert not is_plain_name(name)


def test_a_replaced_file_comes_back_if_the_copy_fails(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "work").mkdir()
    parent, work = (os.open(path, os.O_RDONLY) for path in (tmp_path, tmp_path / "work"))
    with pytest.raises(FileNotFoundError):
        copy_program._put(work, parent, "mine")
    assert (tmp_path / "mine").read_text() == "mine"
    (tmp_path / "work" / "payload").write_text("new")
    copy_program._put(work, parent, "mine")
    assert (tmp_path / "mine").read_text() == "new"
    os.close(parent)
    os.close(work)


def run(data: bytes, *arguments: str, cwd: Path) -> tuple[int, str]:
    """Runs the program as machines do, and returns its exit code and what it says."""
    command = [sys.executable, copy_program.__file__, *arguments]
    environment = {"PYTHONPATH": str(Path(copy_program.__file__).parents[2])}
    done = subprocess.run(command, input=data, capture_output=True, check=False, cwd=cwd, env=environment)
    assert done.stdout == b""
    return done.returncode, done.stderr.decode()


def test_a_tree_takes_the_place_of_whatever_has_its_path(tmp_path: Path) -> None:
    archive = archive_of(info("payload", tarfile.DIRTYPE, mode=0o700), ("payload/new", b"1"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").touch()
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "tree" / "old").mkdir(parents=True)
    (tmp_path / "file").touch()
    for name in ("link", "tree", "file", "none"):
        assert run(archive, "replace", name, cwd=tmp_path) == (0, "")
        assert not (tmp_path / name).is_symlink()
        assert [path.name for path in (tmp_path / name).iterdir()] == ["new"]
    assert (tmp_path / "elsewhere" / "mine").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "link", "tree", "file", "none"}


@pytest.mark.parametrize("command", ["replace", "receive"])
def test_half_a_tree_takes_no_place(tmp_path: Path, command: str) -> None:
    archive = archive_of(info("payload", tarfile.DIRTYPE), ("payload/a", b"1"), info("payload/b", tarfile.CHRTYPE))
    (tmp_path / "file").write_text("old")
    arguments = ["file"] if command == "replace" else ["file", "name"]
    said = "payload/b: is neither a file nor a directory, link or FIFO\n"
    assert run(archive, command, *arguments, cwd=tmp_path) == (1, said)
    said = "the archive cannot be unpacked: empty header\n"
    assert run(archive[:512], command, *arguments, cwd=tmp_path) == (1, said)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_a_directory_is_made_and_filled_beside_what_it_has(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert run(archive_of((f"in/{name}", b"1")), "fill", "new/directory", cwd=tmp_path) == (0, "")
    assert sorted(path.name for path in (tmp_path / "new" / "directory" / "in").iterdir()) == ["a", "b"]
    assert run(archive_of(("in/b", b"2"), ("in/c", b"2")), "fill", "new/directory", "keep", cwd=tmp_path) == (0, "")
    assert [(tmp_path / "new" / "directory" / "in" / name).read_bytes() for name in "abc"] == [b"1", b"1", b"2"]
    (tmp_path / "file").touch()
    assert run(archive_of(), "fill", "file", cwd=tmp_path) == (1, "file: File exists\n")


@pytest.mark.parametrize(
    ("destination", "written"),
    [("file", "file"), ("a/b/file", "a/b/file"), ("a/b/", "a/b/name"), ("there", "there/name"), ("link", "old")],
    ids=["name", "directories", "slash", "directory", "link"],
)
def test_a_file_is_written_with_its_mode(tmp_path: Path, destination: str, written: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "old").write_text("longer than the new one")
    (tmp_path / "link").symlink_to("old")
    assert run(b"new", "write", destination, "name", "755", cwd=tmp_path) == (0, "")
    assert (tmp_path / written).read_text() == "new"
    assert (tmp_path / written).stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "link").is_symlink()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert run(b"new", "write", "file/below", "name", "644", cwd=tmp_path) == (1, "file: File exists\n")
