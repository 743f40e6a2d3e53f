"""A machine answers `cp` with something other than a tree of files: the controller refuses it, and keeps none of it.

The attacker has replaced what sends files in its machine. Whatever it sends, nothing is written but plain files and
directories below the path that the operator named, and nothing at all unless everything has arrived.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from provisioner.base.errors import TaskError
from provisioner.copying import transfer
from provisioner.copying.copy_program import DIRECTORY, END, FILE, MAX_DEPTH, PIECE, PIECE_BYTES, SKIPPED, UP
from provisioner.ssh.exec_frames import frame
from tests.unit.fakes.copies import HostileMachine, directory, file, pieces, tree


def nested(depth: int, name: bytes = b"d") -> bytes:
    return frame(DIRECTORY) + frame(DIRECTORY, name) * depth + frame(UP) * (depth + 1) + frame(END)


def tar_with_a_link() -> bytes:
    spool = io.BytesIO()
    with tarfile.open(fileobj=spool, mode="w") as archive:
        link = tarfile.TarInfo("wanted")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return spool.getvalue()


ANSWERS = {
    "nothing": b"",
    "zeros": b"\0" * 10240,
    "text": b"not a tree " * 1000,
    "a tar archive": tar_with_a_link(),
    "compressed": gzip.compress(tree(file(b"a"))),
    "a parent": tree(file(b"..")),
    "itself": tree(directory(b".")),
    "a path": tree(file(b"../../outside")),
    "an absolute path": tree(file(b"/tmp/outside")),
    "a parent with a slash": tree(directory(b"../")),
    "a top with a name": file(b"outside") + frame(END),
    "a top that is a path": directory(b"../outside") + frame(END),
    "an empty name": tree(file(b"")),
    "a NUL": tree(file(b"a\0b")),
    "a line feed": tree(file(b"a\nb")),
    "an escape sequence": tree(file(b"\x1b]52;c;AA==\x07")),
    "a control character in UTF-8": tree(file(b"\xc2\x9b2J")),
    "invalid UTF-8": tree(file(b"\xff")),
    "a surrogate": tree(file(b"\xed\xa0\x80")),
    "an overlong slash": tree(file(b"..\xc0\xaf..")),
    "a long name": tree(file(b"x" * 256)),
    "a name that comes twice": tree(file(b"a"), file(b"a")),
    "a file as a directory": tree(file(b"a"), directory(b"a")),
    "a directory as a file": tree(directory(b"a"), file(b"a")),
    "two tops": file(b"") + file(b"") + frame(END),
    "only what was skipped": frame(SKIPPED, b"a") + frame(END),
    "a file inside a file": tree(frame(FILE, b"a") + file(b"b")),
    "contents of no file": tree(frame(PIECE, b"x")),
    "contents of a directory": frame(DIRECTORY) + frame(PIECE, b"x" * 100) + frame(END),
    "a way out": frame(DIRECTORY) + frame(UP) + frame(UP) + frame(END),
    "a file after the way out": frame(DIRECTORY) + frame(UP) + file(b"a") + frame(END),
    "an open directory": frame(DIRECTORY) + frame(END),
    "an open file": frame(FILE) + frame(PIECE, b"x" * PIECE_BYTES) + frame(END),
    "no end": directory(b"", file(b"a")),
    "half a frame": tree(file(b"a", b"x" * 1000))[:-500],
    "something after the end": tree(file(b"a")) + b"\0",
    "an end with contents": directory(b"") + frame(END, b"x"),
    "too deep": nested(MAX_DEPTH),
    "deeper than Python recurses": nested(5000),
    "a long path": nested(50, b"x" * 255),
    "an unknown kind": tree(frame(b"l", b"a")),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("size", [1 << 16, 1], ids=["whole", "bytes"])
def test_what_is_no_tree_leaves_nothing(tmp_path: Path, name: str, size: int) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    machine = HostileMachine(pieces(ANSWERS[name], size))
    with pytest.raises(TaskError) as raised:
        transfer.download(machine.connection, "/home/agent/wanted", inside / "copy")
    assert list(tmp_path.iterdir()) == [inside]
    assert list(inside.iterdir()) == []
    assert raised.value.message.isprintable()
    assert len(raised.value.message) < 400


def test_the_deepest_tree_and_the_oddest_plain_names_are_copied(tmp_path: Path) -> None:
    odd = ["-rf", "~", "$(id)", "a\\b", "*", " ", "...", ".bashrc", "x" * 255, "\u202e"]
    answer = tree(*(file(name.encode()) for name in odd))
    transfer.download(HostileMachine(pieces(answer)).connection, "odd", tmp_path)
    assert sorted(path.name for path in (tmp_path / "odd").iterdir()) == sorted(odd)
    transfer.download(HostileMachine(pieces(nested(MAX_DEPTH - 1))).connection, "deep", tmp_path)
    assert (tmp_path / "deep").joinpath(*["d"] * (MAX_DEPTH - 1)).is_dir()
