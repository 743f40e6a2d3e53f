"""Tests unpacking archives, against GNU tar where both should do the same."""

from __future__ import annotations

import errno
import io
import os
import resource
import subprocess
import tarfile
import tempfile
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from provisioner.copying import unpack_program
from provisioner.copying.unpack_program import unpack
from tests.unit.fakes.exec_call import GUEST_PYTHON

OTHER = 54321
# Unpacks stdin as another user.
AS_OTHER = f"""
import os, sys
sys.path.insert(0, {str(Path(unpack_program.__file__).parents[2])!r})
from provisioner.copying.unpack_program import unpack
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
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    return spool.getvalue()


def info(name: str, kind: bytes, **fields: Any) -> tarfile.TarInfo:
    """Returns a member that is no file."""
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
    for directory in tmp_path.rglob("closed"):
        directory.chmod(0o755)


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
    unpacked(archive, top)
    broken = [data for data in damaged(archive) if data != archive]
    assert len(broken) > 12
    for data in broken:
        with pytest.raises(OSError, match="the archive cannot be unpacked") as raised:
            unpacked(data, top)
        assert raised.value.errno == errno.EBADMSG


def test_an_empty_archive_is_a_whole_one(top: Path) -> None:
    unpacked(archive_of(), top)
    assert list(top.iterdir()) == []


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
