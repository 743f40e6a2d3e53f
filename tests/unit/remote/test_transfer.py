"""Tests downloads from a hostile machine."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest

from provisioner.errors import TaskError, UsageError
from provisioner.remote import transfer
from provisioner.remote.exchange import Completed
from provisioner.remote.ssh import Connection


class HostileMachine:
    """Answers every command with the same bytes."""

    def __init__(self, answer: bytes, exit_code: int = 0) -> None:
        self._answer, self._exit_code = answer, exit_code

    def run(
        self, argv: Sequence[str], *, on_stdout: Callable[[bytes], None], limit_bytes: int, timeout_seconds: float
    ) -> Completed:
        for start in range(0, len(self._answer), 4096):
            on_stdout(self._answer[start : start + 4096])
        return Completed(self._exit_code, b"", b"tar: no such file")


def archive(*members: tarfile.TarInfo, content: bytes = b"content") -> bytes:
    spool = io.BytesIO()
    with tarfile.open(fileobj=spool, mode="w") as tar:
        for member in members:
            member.size = len(content) if member.isfile() else 0
            tar.addfile(member, io.BytesIO(content))
    return spool.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.uid = kind, link, 0o4777, 0
    return info


def download(answer: bytes, tmp_path: Path, exit_code: int = 0) -> transfer.Downloaded:
    machine = cast(Connection, HostileMachine(answer, exit_code))
    return transfer.download(machine, "/home/agent/wanted", tmp_path / "inside" / "copy")


@pytest.fixture(autouse=True)
def inside(tmp_path: Path) -> Path:
    (tmp_path / "inside").mkdir()
    return tmp_path / "inside"


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(archive(member("../outside")), id="a parent"),
        pytest.param(archive(member("wanted", tarfile.DIRTYPE), member("wanted/../../outside")), id="a parent below"),
        pytest.param(archive(member("wanted"), member("wanted")), id="the same name twice"),
        pytest.param(archive(member("wanted"), member("beside")), id="another file beside"),
        pytest.param(archive(member("/outside")), id="an absolute path"),
        pytest.param(archive(member("wanted", tarfile.SYMTYPE, "/etc/shadow")), id="a link out"),
        pytest.param(archive(member("wanted", tarfile.SYMTYPE, "../../outside"), member("wanted/file")), id="through"),
        pytest.param(archive(member("wanted", tarfile.LNKTYPE, "/etc/hostname")), id="a hard link"),
        pytest.param(archive(member("wanted", tarfile.CHRTYPE)), id="a device"),
        pytest.param(archive(member("wanted", tarfile.FIFOTYPE)), id="a fifo"),
        pytest.param(archive(member("another")), id="another name"),
        pytest.param(archive(member("wanted"), member("wanted/file")), id="a file below a file"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"\0" * 10240, id="zeros"),
        pytest.param(b"not an archive" * 1000, id="text"),
        pytest.param(gzip.compress(archive(member("wanted"))), id="compressed"),
    ],
)
def test_nothing_is_written_from_an_invalid_or_hostile_archive(answer: bytes, tmp_path: Path, inside: Path) -> None:
    with pytest.raises(TaskError):
        download(answer, tmp_path)
    assert list(tmp_path.iterdir()) == [inside]
    assert list(inside.iterdir()) == []


def test_a_file_is_copied_without_owner_and_special_bits(tmp_path: Path, inside: Path) -> None:
    assert download(archive(member("wanted")), tmp_path) == transfer.Downloaded(1, ())
    copy = inside / "copy"
    assert copy.read_bytes() == b"content"
    assert copy.stat().st_mode & 0o7022 == 0
    assert copy.stat().st_mode & 0o100 == 0o100


def test_files_of_a_directory_are_copied_and_skipped_links_reported(tmp_path: Path, inside: Path) -> None:
    answer = archive(
        member("wanted", tarfile.DIRTYPE),
        member("wanted/file"),
        member("wanted/link", tarfile.SYMTYPE, "/etc/passwd"),
        member("wanted/again", tarfile.LNKTYPE, "wanted/file"),
        member("wanted/deep", tarfile.DIRTYPE),
        member("wanted/deep/file"),
    )
    assert download(answer, tmp_path) == transfer.Downloaded(2, ("wanted/link", "wanted/again"))
    names = sorted(str(path.relative_to(inside / "copy")) for path in (inside / "copy").rglob("*"))
    assert names == ["deep", "deep/file", "file"]


def test_a_download_above_the_limit_is_refused_while_it_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "DOWNLOAD_LIMIT_BYTES", 20_000)
    with pytest.raises(TaskError, match="larger than"):
        download(archive(member("wanted"), content=b"x" * 100_000), tmp_path)


def test_the_error_for_a_missing_file_shows_the_machines_message(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="could not be read") as raised:
        download(b"", tmp_path, exit_code=2)
    assert raised.value.details == "tar: no such file"


def test_a_directory_of_the_controller_is_not_overwritten(tmp_path: Path, inside: Path) -> None:
    (inside / "copy" / "wanted").mkdir(parents=True)
    with pytest.raises(UsageError, match="exists and is a directory"):
        download(archive(member("wanted")), tmp_path)


def test_what_takes_little_to_send_and_much_to_keep_is_refused(tmp_path: Path, inside: Path) -> None:
    sparse = member("wanted", tarfile.GNUTYPE_SPARSE)
    block = bytearray(sparse.tobuf(tarfile.GNU_FORMAT))
    block[386:398], block[398:410] = b"00000000000\0", b"00000000000\0"  # one piece, of no bytes
    block[483:495] = b"07777777777\0"  # a gibibyte, all of it a hole
    block[148:156] = b" " * 8
    block[148:155] = b"%06o\0" % sum(block)
    nested = [member("/".join(["wanted", *["d"] * depth]), tarfile.DIRTYPE) for depth in range(200)]
    header = tarfile.TarInfo("wanted")
    header.pax_headers = {"comment": "x" * (2 << 20)}
    for answer in (bytes(block) + b"\0" * 10240, archive(*nested), archive(header)):
        with pytest.raises(TaskError, match="cannot be unpacked"):
            download(answer, tmp_path)
        assert list(inside.iterdir()) == []
