"""Tests the program that copies files inside machines, and what it sends."""

from __future__ import annotations

import errno
import io
import os
import resource
import socket
import subprocess
import sys
import tarfile
import tempfile
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from provisioner.copying import copy_program
from provisioner.copying.copy_program import END, MAX_DEPTH, PROGRAM, SKIPPED, TreeSender, is_plain_name, unpack
from provisioner.ssh.exec_frames import frame
from tests.unit.fakes.copies import directory, file, tree
from tests.unit.fakes.exec_call import GUEST_PYTHON

OTHER = 54321
# Unpacks stdin as another user.
AS_OTHER = f"""
import os, sys
sys.path.insert(0, {str(Path(copy_program.__file__).parents[2])!r})
from provisioner.copying.copy_program import unpack
os.setgroups([]); os.setgid({OTHER}); os.setuid({OTHER})
os.umask(0o022)
unpack(sys.stdin.buffer, os.open(".", os.O_RDONLY))
"""


def packed(source: Path, arcname: str = "top") -> bytes:
    """Returns an archive as `cp` makes it."""
    spool = io.BytesIO()
    with tarfile.open(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(source, arcname=arcname)
    return spool.getvalue()


def archive_of(*members: tarfile.TarInfo | tuple[str, bytes]) -> bytes:
    """Returns an archive of members; of files, the name and the contents are enough."""
    spool = io.BytesIO()
    with tarfile.open(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                archive.addfile(info(member[0], tarfile.REGTYPE, size=len(member[1])), io.BytesIO(member[1]))
    return spool.getvalue()


def info(name: str, kind: bytes, **fields: Any) -> tarfile.TarInfo:
    """Returns a member."""
    member = tarfile.TarInfo(name)
    member.type = kind
    for field, value in fields.items():
        setattr(member, field, value)
    return member


def unpacked(data: bytes, directory: Path) -> None:
    top = os.open(directory, os.O_RDONLY)
    try:
        unpack(io.BytesIO(data), top)
    finally:
        os.close(top)


def listing(top: Path) -> dict[str, tuple[object, ...]]:
    """Everything about each entry that a copy can keep."""
    entries: dict[str, tuple[object, ...]] = {}
    for path in sorted(top.rglob("*")):
        status = path.lstat()
        contents = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        name = os.fsencode(path.relative_to(top)).decode(errors="backslashreplace")
        entries[name] = (oct(status.st_mode), status.st_uid, status.st_mtime, status.st_nlink, contents)
    return entries


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tree with everything that an archive can bring."""
    source = tmp_path / "source"
    (source / "deep" / "ä b" / "c").mkdir(parents=True)
    (source / "deep" / "ä b" / "c" / "file").write_bytes(b"x" * 200_000)
    (source / "empty").mkdir(mode=0o700)
    (source / "program").write_text("#!/bin/sh\n")
    (source / "program").chmod(0o6775)
    (source / "name").hardlink_to(source / "program")
    (source / "open").mkdir()
    (source / "open").chmod(0o1777)
    (source / "link").symlink_to("program")
    (source / "away").symlink_to("/etc/hostname")
    (source / "dangling").symlink_to("../../nowhere")
    (source / "secret").write_text("")
    (source / "secret").chmod(0o400)
    (source / ("n" * 200)).write_text("a long name")
    Path(os.fsdecode(bytes(source) + b"/\xff\n")).write_text("no UTF-8")
    os.mkfifo(source / "fifo", 0o640)
    (source / "closed").mkdir()
    (source / "closed" / "file").write_text("1")
    (source / "closed").chmod(0o555)
    for number, path in enumerate(source.rglob("*")):
        os.utime(path, (number, 1_000_000_000.25 + number), follow_symlinks=False)
    return source


@pytest.fixture
def top(tmp_path: Path) -> Iterator[Path]:
    """The directory to unpack in."""
    (tmp_path / "unpacked").mkdir()
    yield tmp_path / "unpacked"
    for closed in tmp_path.rglob("closed"):
        closed.chmod(0o755)


def test_a_tree_arrives_as_gnu_tar_unpacks_it(source: Path, top: Path, tmp_path: Path) -> None:
    (tmp_path / "by-tar").mkdir()
    data = packed(source)
    unpacked(data, top)
    subprocess.run(["tar", "-x", "--no-same-owner", "-C", str(tmp_path / "by-tar")], input=data, check=True)
    assert listing(top) == listing(tmp_path / "by-tar")
    assert (top / "top" / "name").samefile(top / "top" / "program")
    assert len(listing(top)) == 18


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_than_root_gets_what_gnu_tar_would_leave(source: Path) -> None:
    data = packed(source)
    found = []
    ours = [GUEST_PYTHON, "-I", "-S", "-c", AS_OTHER]
    tar = ["setpriv", "--reuid", str(OTHER), "--regid", str(OTHER), "--clear-groups", "tar", "-x", "--no-same-owner"]
    for command in (ours, tar):
        with tempfile.TemporaryDirectory() as directory:  # not below pytest's, which others cannot enter
            os.chown(directory, OTHER, OTHER)
            subprocess.run(command, input=data, cwd=directory, check=True, umask=0o022)
            found.append(listing(Path(directory)))
    assert found[0] == found[1]
    assert {entry[1] for entry in found[0].values()} == {OTHER}


def test_what_is_there_stays_unless_it_has_a_members_name(top: Path) -> None:
    (top / "kept").mkdir(mode=0o750)
    os.utime(top / "kept", (1, 1))
    (top / "kept" / "other").write_text("other")
    (top / "real").mkdir()
    (top / "linked").symlink_to("real")
    (top / "file").symlink_to("kept/other")
    (top / "empty").mkdir()
    (top / "was-a-file").write_text("")
    archive = archive_of(
        info("kept", tarfile.DIRTYPE, mode=0o700), ("kept/new", b"1"), info("linked", tarfile.DIRTYPE),
        ("linked/a", b"2"), ("file", b"3"), ("empty", b"4"), info("was-a-file", tarfile.DIRTYPE, mode=0o711),
        ("was-a-file/b", b"5"),
        ("made/on/the/way", b"6"), info("kept/new", tarfile.SYMTYPE, linkname="other"),
        info("kept/new", tarfile.LNKTYPE, linkname="made/on/the/way"),
    )  # fmt: skip
    unpacked(archive, top)
    assert (top / "kept").stat().st_mode & 0o777 == 0o750
    assert (top / "was-a-file").stat().st_mode & 0o777 == 0o711
    assert (top / "linked").is_symlink()
    files = {str(path.relative_to(top)): path.read_text() for path in top.rglob("*") if path.is_file()}
    assert files == {
        "kept/other": "other", "kept/new": "6", "real/a": "2", "file": "3", "empty": "4", "was-a-file/b": "5",
        "made/on/the/way": "6",
    }  # fmt: skip
    assert not (top / "file").is_symlink()


@pytest.mark.parametrize("name", [".", "./", "./a/../b", "/a", "..", "a/../../b", ""], ids=repr)
def test_no_name_leads_out_and_no_file_is_without_one(top: Path, name: str) -> None:
    for member in (("fine", b"1"), info("first", tarfile.DIRTYPE)):
        data = archive_of(member, info(name, tarfile.REGTYPE), ("never", b"1"))
        with pytest.raises(OSError, match=r"leads out|has no name") as raised:
            unpacked(data, top)
        assert raised.value.errno == errno.EINVAL
    assert sorted(path.name for path in top.iterdir()) == ["fine", "first"]
    assert sorted(path.name for path in top.parent.iterdir()) == [top.name]


def test_the_top_may_be_a_member(top: Path) -> None:
    top.chmod(0o700)
    unpacked(archive_of(info(".", tarfile.DIRTYPE, mode=0o777), ("./a", b"1")), top)
    assert (top / "a").read_text() == "1"
    assert top.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("member", "number"),
    [
        (info("a", tarfile.CHRTYPE, devmajor=1, devminor=3), errno.EINVAL),
        (info("a", tarfile.BLKTYPE), errno.EINVAL),
        (info("a", tarfile.LNKTYPE, linkname="missing"), errno.ENOENT),
        (info("a", tarfile.LNKTYPE, linkname="../secret"), errno.EINVAL),
        (info("a", tarfile.LNKTYPE, linkname="/etc/passwd"), errno.EINVAL),
        (("full", b"1"), errno.ENOTEMPTY),
        (("file/below", b"1"), errno.ENOTDIR),
        (("n" * 256, b"1"), errno.ENAMETOOLONG),
    ],
    ids=["device", "disk", "link-to-nothing", "link-up", "link-to-root", "full", "below-a-file", "long"],
)
def test_what_cannot_be_written_is_named_with_its_errno(top: Path, member: Any, number: int) -> None:
    (top.parent / "secret").write_text("")
    (top / "full").mkdir()
    (top / "full" / "entry").touch()
    (top / "file").touch()
    with pytest.raises(OSError) as raised:  # noqa: PT011
        unpacked(archive_of(member), top)
    assert (raised.value.errno, raised.value.filename) == (number, member[0] if isinstance(member, tuple) else "a")
    assert raised.value.strerror


def test_a_full_disk_is_named(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            unpacked(archive_of(("big", b"x" * 200_000)), top)
    finally:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, "big")


def test_a_name_that_another_process_keeps_taking_is_given_up(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = os.unlink

    def unlink_in_vain(name: str, **options: Any) -> None:
        unlink(name, **options)
        (top / name).write_text("another's")

    monkeypatch.setattr(os, "unlink", unlink_in_vain)
    (top / "a").write_text("another's")
    with pytest.raises(FileExistsError) as raised:
        unpacked(archive_of(("a", b"1")), top)
    assert raised.value.filename == "a"
    assert (top / "a").read_text() == "another's"


def damaged(archive: bytes) -> Iterator[bytes]:
    """Returns an archive cut off at each half block, and with one header damaged."""
    end = len(archive.rstrip(b"\0")) // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE + tarfile.BLOCKSIZE
    for size in range(0, end + 1, tarfile.BLOCKSIZE // 2):
        yield archive[:size]
    for place in (0, 3 * tarfile.BLOCKSIZE):
        yield archive[:place] + b"?" + archive[place + 1 :]


def test_a_damaged_or_endless_archive_is_refused(top: Path) -> None:
    archive = archive_of(("a", b"x" * 600), ("b", b""), ("c", b"1"))
    for whole in (archive_of(), archive):
        unpacked(whole, top)
    broken = [data for data in damaged(archive) if data != archive]
    assert len(broken) > 12
    for data in broken:
        with pytest.raises(OSError, match="the archive cannot be unpacked") as raised:
            unpacked(data, top)
        assert raised.value.errno == errno.EBADMSG


class Produced(io.RawIOBase):
    """An archive of members with one name, which is never whole in memory."""

    def __init__(self, members: int, blocks: int) -> None:
        self._pieces, self._data = self._produce(members, blocks), b""

    @staticmethod
    def _produce(members: int, blocks: int) -> Iterator[bytes]:
        for _ in range(members):
            member = tarfile.TarInfo("the one name")
            member.size, member.mtime = blocks * tarfile.BLOCKSIZE, 0.5
            yield member.tobuf(tarfile.PAX_FORMAT)
            yield from (bytes(tarfile.BLOCKSIZE) for _ in range(blocks))
        yield bytes(tarfile.RECORDSIZE)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while len(self._data) < size and (piece := next(self._pieces, b"")):
            self._data += piece
        piece, self._data = self._data[:size], self._data[size:]
        return piece


@pytest.mark.parametrize(("members", "blocks"), [(3_000, 0), (2, 40_000)], ids=["many", "large"])
def test_memory_does_not_grow_with_the_archive(top: Path, members: int, blocks: int) -> None:
    # In a process of its own: threads that an earlier test left behind would be measured too.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        peak = processes.submit(_peak_of_unpacking, top, members, blocks).result()
    assert (top / "the one name").stat().st_size == blocks * tarfile.BLOCKSIZE
    assert peak < 1 << 20


def _peak_of_unpacking(top: Path, members: int, blocks: int) -> int:
    directory = os.open(top, os.O_RDONLY)
    unpack(cast(BinaryIO, Produced(1, 1)), directory)
    tracemalloc.start()
    unpack(cast(BinaryIO, Produced(members, blocks)), directory)
    return tracemalloc.get_traced_memory()[1]


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
    assert run(b"", "send", "missing", cwd=tmp_path) == (1, "missing: No such file or directory\n")


def test_only_a_plain_name_is_copied() -> None:
    for name in ("a", " ", "ä", "-rf", "a\\b", "...", "\N{ZERO WIDTH JOINER}", "x" * 255):
        assert is_plain_name(name.encode()), name
    for other in (b"", b".", b"..", b"a/b", b"/", b"\0", b"a\n", b"\x1b]", b"\x7f", b"\xc2\x9b", b"\xff"):
        assert not is_plain_name(other), other


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
