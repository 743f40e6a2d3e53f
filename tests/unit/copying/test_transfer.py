"""Tests copies between the controller and a machine."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest

from provisioner.base.errors import HostError, TaskError, UsageError
from provisioner.copying import transfer, trees
from provisioner.copying.copy_program import PIECE_BYTES, PROGRAM, SKIPPED
from provisioner.ssh.exec_frames import frame
from tests.unit.fakes.copies import HostileMachine, ThisHost, directory, file, pieces, tree


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    """Returns a tree with what can be copied."""
    origin = tmp_path / "origin"
    (origin / "deep" / "ä b").mkdir(parents=True)
    (origin / "deep" / "$(id)").write_bytes(b"\0\xff")
    for size in (0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES):
        (origin / f"size{size}").write_bytes(b"x" * size)
    (origin / "program").write_text("#!/bin/sh\n")
    (origin / "program").chmod(0o6755)
    return origin


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    """Returns the directory to which the tests copy."""
    (tmp_path / "inside").mkdir()
    return tmp_path / "inside"


def contents(top: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(top)): path.read_bytes() if path.is_file() else None for path in top.rglob("*")}


def download(source: Path, destination: Path) -> transfer.Downloaded:
    return transfer.download(ThisHost().connection, str(source), destination)


def upload(source: Path, destination: object) -> int:
    return transfer.upload(ThisHost().connection, source, str(destination))


def test_a_tree_comes_down_without_special_permissions(origin: Path, inside: Path) -> None:
    assert download(origin, inside / "copy") == transfer.Downloaded(8, (), 0)
    assert contents(inside / "copy") == contents(origin)
    assert (inside / "copy" / "program").stat().st_mode & 0o7100 == 0o100
    assert (inside / "copy" / "size1").stat().st_mode & 0o7111 == 0
    assert [path.name for path in inside.iterdir()] == ["copy"]


def test_a_file_is_copied_down_into_a_directory_or_over_a_file(
    origin: Path, inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inside)
    download(origin / "program", Path())
    assert download(origin / "size1", inside / "program") == transfer.Downloaded(1, (), 0)
    assert (inside / "program").read_text() == "x"
    download(origin / "deep", Path("../inside/./"))
    assert sorted(contents(inside)) == ["deep", "deep/$(id)", "deep/ä b", "program"]


TREE = tree(
    file(b"a"),
    directory("ä".encode(), frame(SKIPPED, b"link"), directory(b"c", file(b"d", b""))),
    frame(SKIPPED, b"\xff\x1b"),
    file(b"e", b"x" * PIECE_BYTES, PROGRAM),
)


@pytest.mark.parametrize("size", [1, 3, 4, 1000, 1 << 20], ids=str)
def test_a_tree_is_read_however_it_is_cut(inside: Path, size: int) -> None:
    done = transfer.download(HostileMachine(pieces(TREE, size)).connection, "/top", inside)
    assert done == transfer.Downloaded(3, ("top/ä/link", "top/\\xff\\x1b"), 2)
    found = {"top": None, "top/a": b"content", "top/ä": None, "top/ä/c": None, "top/ä/c/d": b""}
    assert contents(inside) == {**found, "top/e": b"x" * PIECE_BYTES}
    assert [os.access(inside / "top" / name, os.X_OK) for name in ("a", "e")] == [False, True]


def test_only_some_of_many_skipped_paths_are_kept(inside: Path) -> None:
    machine = HostileMachine(pieces(tree(*[frame(SKIPPED, b"link")] * 5000)))
    done = transfer.download(machine.connection, "/top", inside)
    assert (done.skipped_count, len(done.skipped)) == (5000, trees.MAX_SKIPPED_NAMED)


def test_what_is_not_copied_is_named(origin: Path, inside: Path) -> None:
    (origin / "deep" / "link").symlink_to("/etc")
    (origin / "new\nline").touch()
    downloaded = download(origin, inside)
    assert (downloaded.files, downloaded.skipped_count) == (8, 2)
    assert downloaded.skipped == ("origin/deep/link", "origin/new\\nline")


@pytest.mark.parametrize("existing", ["directory", "link"])
def test_only_a_file_is_replaced(origin: Path, inside: Path, existing: str) -> None:
    if existing == "directory":
        (inside / "size1").mkdir()
    else:
        (inside / "size1").symlink_to(origin / "size0")
    with pytest.raises(UsageError, match="size1 exists and is a"):
        download(origin / "size1", inside)
    assert contents(inside).keys() == {"size1"}
    assert (origin / "size0").read_bytes() == b""


def test_a_directory_does_not_replace_a_file(origin: Path, inside: Path) -> None:
    (inside / "copy").write_text("mine")
    with pytest.raises(UsageError, match="copy cannot be written: Not a directory"):
        download(origin, inside / "copy")
    assert contents(inside) == {"copy": b"mine"}


@pytest.mark.parametrize("destination", ["missing/copy", "file/copy"])
def test_a_destination_without_a_directory_is_refused(origin: Path, inside: Path, destination: str) -> None:
    (inside / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        download(origin, inside / destination)


@pytest.mark.parametrize("source", ["missing", "link", "fifo"])
def test_what_cannot_be_sent_is_said_with_the_machines_words(origin: Path, inside: Path, source: str) -> None:
    (origin / "link").symlink_to("program")
    os.mkfifo(origin / "fifo")
    with pytest.raises(UsageError, match="could not be read in the machine") as raised:
        download(origin / source, inside)
    assert raised.value.details
    assert "Traceback" not in raised.value.details
    assert contents(inside) == {}


@pytest.mark.parametrize(
    ("limit", "value", "error", "says"),
    [("LIMIT_BYTES", 100_000, TaskError, "larger than"), ("FREE_BYTES", 1 << 60, HostError, "does not fit")],
    ids=["too-large", "full-disk"],
)
def test_a_tree_above_a_limit_is_refused_while_it_arrives(
    inside: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, error: type[Exception], says: str
) -> None:
    monkeypatch.setattr(trees, limit, value)
    with pytest.raises(error, match=says):
        transfer.download(HostileMachine(pieces(tree(file(b"a", b"x" * 200_000)))).connection, "a", inside)
    assert contents(inside) == {}


def test_a_transfer_without_an_end_fails(inside: Path) -> None:
    class SlowMachine(HostileMachine):
        def run(self, *_: object, **__: object) -> None:  # type: ignore[override]
            raise TimeoutError

    with pytest.raises(TaskError, match="within an hour"):
        transfer.download(SlowMachine([]).connection, "a", inside)


def test_an_interrupted_download_leaves_nothing(inside: Path) -> None:
    def interrupted() -> object:
        yield tree(file(b"a", b"x" * 200_000))[:100_000]
        assert list(inside.iterdir())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transfer.download(HostileMachine(interrupted()).connection, "a", inside)  # type: ignore[arg-type]
    assert contents(inside) == {}


def test_a_tree_goes_up(origin: Path, inside: Path) -> None:
    (origin / "link").symlink_to("program")
    assert upload(origin, inside / "copy") == 8
    assert contents(inside / "copy") == contents(origin)
    assert (inside / "copy" / "link").is_symlink()
    assert [path.name for path in inside.iterdir()] == ["copy"]


def test_a_file_is_copied_up_into_a_directory_or_over_anything(origin: Path, inside: Path) -> None:
    upload(origin / "size1", inside)
    upload(origin / "size1", f"{inside}/new/er/")
    upload(origin, inside / "size1")
    upload(origin / "size0", inside / "size1" / "deep" / "ä b" / "..")
    upload(origin / "program", inside / "size1" / "size1")
    assert (inside / "size1" / "size1").read_text() == "#!/bin/sh\n"
    assert (inside / "size1" / "deep" / "size0").exists()
    assert (inside / "new" / "er" / "size1").read_text() == "x"
    assert sorted(path.name for path in inside.iterdir()) == ["new", "size1"]


def test_what_cannot_go_up_is_said_in_one_line(origin: Path, inside: Path) -> None:
    with pytest.raises(UsageError, match="could not be written in the machine") as raised:
        upload(origin, inside / "missing" / "copy")
    assert raised.value.details == "missing: No such file or directory"
    with pytest.raises(UsageError, match="does not exist"):
        upload(origin / "missing", inside)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (PermissionError(13, "Permission denied", "origin/program"), UsageError, r"program cannot be read: Permission"),
        (OSError("unexpected end of data"), HostError, r"^program cannot be packed: unexpected end of data\.$"),
    ],
    ids=["refused", "cut off"],
)
def test_a_file_that_cannot_be_packed_is_named(
    tmp_path: Path, inside: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, kind: type[Exception], message: str
) -> None:
    add = tarfile.TarFile.addfile

    def refuse(archive: tarfile.TarFile, member: tarfile.TarInfo, file: Any = None) -> None:
        if file:
            raise error
        add(archive, member)

    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "program").write_text("#!/bin/sh\n")
    monkeypatch.setattr(tarfile.TarFile, "addfile", refuse)
    with pytest.raises(kind, match=message):
        upload(tmp_path / "source", inside)


class FullFile(io.BytesIO):
    """A temporary file on a full disk."""

    def write(self, _: object) -> int:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        super().close()
        raise OSError(28, "No space left on device")


def _no_file() -> NoReturn:
    raise OSError(28, "No space left on device", "/tmp/tmpabc")


@pytest.mark.parametrize("temporary_file", [FullFile, _no_file], ids=["while it is written", "before that"])
def test_files_for_which_the_controllers_disk_is_full_are_told(
    origin: Path, inside: Path, monkeypatch: pytest.MonkeyPatch, temporary_file: object
) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", temporary_file)
    with pytest.raises(HostError, match=r"^The files for the machine cannot be packed: No space left on device\.$"):
        upload(origin, inside)
