"""Tests the reader of a machine's file tree with honest trees. tests/attacks has the others."""

from __future__ import annotations

import pytest

from provisioner.base.frames import frame
from provisioner.copying.copy_program import END, PIECE_BYTES, PROGRAM, SKIPPED
from provisioner.copying.tree_reader import MAX_SKIPPED_NAMED, TreeReader
from tests.unit.fakes.copies import directory, file, pieces, tree

TREE = tree(
    file(b"a"),
    directory("ä".encode(), frame(SKIPPED, b"link"), directory(b"c", file(b"d", b""))),
    frame(SKIPPED, b"\xff\x1b"),
    file(b"e", b"x" * PIECE_BYTES, PROGRAM),
)


class Calls(list[tuple[object, ...]]):
    """Keeps the calls that a reader makes. Joins pieces of contents."""

    def begin_directory(self, name: str) -> None:
        self.append(("directory", name))

    def end_directory(self) -> None:
        self.append(("end",))

    def begin_file(self, name: str, *, executable: bool) -> None:
        self.append(("program" if executable else "file", name))

    def write(self, data: bytes) -> None:
        self.append((len(data),))

    def end_file(self) -> None:
        self.append(("end",))


@pytest.mark.parametrize("size", [1, 3, 4, 1000, 1 << 20], ids=str)
def test_a_tree_is_read_however_it_is_cut(size: int) -> None:
    calls = Calls()
    reader = TreeReader(calls)
    for piece in pieces(TREE, size):
        reader.feed(piece)
    reader.finish()
    assert calls == [
        ("directory", ""), ("file", "a"), (7,), ("end",), ("directory", "ä"), ("directory", "c"), ("file", "d"), (0,),
        ("end",), ("end",), ("end",), ("program", "e"), (PIECE_BYTES,), (0,), ("end",), ("end",),
    ]  # fmt: skip
    assert (reader.files, reader.skipped, reader.skipped_paths) == (3, 2, ["ä/link", "\\xff\\x1b"])


def test_a_single_file_is_a_tree() -> None:
    calls = Calls()
    reader = TreeReader(calls)
    reader.feed(file(b"") + frame(END))
    reader.finish()
    assert calls == [("file", ""), (7,), ("end",)]


def test_only_some_of_many_skipped_paths_are_kept() -> None:
    reader = TreeReader(Calls())
    reader.feed(tree(*[frame(SKIPPED, b"link")] * 5000))
    assert (reader.skipped, len(reader.skipped_paths)) == (5000, MAX_SKIPPED_NAMED)
