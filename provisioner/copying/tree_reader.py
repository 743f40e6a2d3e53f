"""Reads the frames in which a machine sends a file tree (see copy_program.py), and refuses all that is not plain.

The machine is not trusted: names, depth, entries and bytes are bounded here. Touches no file.
"""

from __future__ import annotations

from typing import Protocol

from provisioner.base.frames import Frames
from provisioner.base.validation import shown
from provisioner.copying.copy_program import (
    DIRECTORY,
    END,
    FILE,
    MAX_DEPTH,
    PIECE,
    PIECE_BYTES,
    PROGRAM,
    SKIPPED,
    UP,
    is_plain_name,
)  # fmt: skip

LIMIT_BYTES = 4 << 30
# As many as the file systems of large Python or Node projects hold. Limits the inodes that a machine can use up.
MAX_ENTRIES = 250_000
# What a file or directory takes on common file systems, even if it is empty.
ENTRY_BYTES = 4096
MAX_NAME_BYTES = 255
# Leaves as much for the directory that the tree is copied to: the kernel's limit on a path is 4096.
MAX_PATH_BYTES = 2048
MAX_SKIPPED_NAMED = 100


class TreeError(Exception):
    """The machine sent something that is no tree of files and directories, or too large a one."""


class TreeSink(Protocol):
    """Describes what takes the tree: calls are properly nested, and each name is a plain one, or empty for the top."""

    def begin_directory(self, name: str) -> None:
        """Takes a directory. What follows is inside it, until it ends."""

    def end_directory(self) -> None:
        """Takes the end of the innermost directory."""

    def begin_file(self, name: str, *, executable: bool) -> None:
        """Takes a file."""

    def write(self, data: bytes) -> None:
        """Takes a piece of the file's contents."""

    def end_file(self) -> None:
        """Takes the end of the file."""


class TreeReader:
    """Reads a stream of frames piece by piece, in little memory.

    Args:
        sink: takes the tree.

    Attributes:
        files: the number of files read.
        skipped: the number of entries that the machine says it skipped.
        skipped_paths: the first of them, without the top's name, with control characters escaped.
    """

    def __init__(self, sink: TreeSink) -> None:
        self._sink = sink
        self._frames = Frames(self._require_expected)
        self._directories: list[bytes] = []
        self._file: bytes | None = None
        self._has_top = self._is_complete = False
        self._entries = self._bytes = 0
        self.files = self.skipped = 0
        self.skipped_paths: list[str] = []

    def feed(self, data: bytes) -> None:
        """Takes the next piece of the stream, and passes complete frames on.

        Raises:
            TreeError: the stream is refused.
        """
        for kind, payload in self._frames.feed(data):
            self._receive(kind, payload)
        if self._is_complete and not self._frames.is_between:
            raise TreeError("something follows its end")

    def finish(self) -> None:
        """Checks that the tree is complete.

        Raises:
            TreeError: the stream ended early.
        """
        if not self._is_complete:
            raise TreeError("it ends early")

    def _require_expected(self, kind: bytes, length: int) -> None:
        inside = bool(self._directories)
        if self._is_complete:
            raise TreeError("something follows its end")
        expected: tuple[bytes, ...]
        if self._file is not None:
            expected = (PIECE,)
        elif inside:
            expected = (DIRECTORY, UP, FILE, PROGRAM, SKIPPED)
        else:
            expected = (END,) if self._has_top else (DIRECTORY, FILE, PROGRAM)
        if kind not in expected:
            raise TreeError(f"a frame of kind {kind!r} does not belong {self._where()}")
        if length > {PIECE: PIECE_BYTES, UP: 0, END: 0}.get(kind, MAX_NAME_BYTES):
            raise TreeError(f"a frame of kind {kind!r} is too long {self._where()}")

    def _where(self) -> str:
        path = [*self._directories[1:], *([] if self._file is None else [self._file])]
        return f"in {shown(_text(path))}" if any(path) else "there"

    def _receive(self, kind: bytes, payload: bytes) -> None:
        if kind == PIECE:
            self._receive_piece(payload)
        elif kind == UP:
            self._directories.pop()
            self._sink.end_directory()
        elif kind == SKIPPED:
            self._count(payload, 0)
            self.skipped += 1
            if self.skipped <= MAX_SKIPPED_NAMED:
                self.skipped_paths.append(_text([*self._directories[1:], payload]))
        elif kind == END:
            self._is_complete = True
        else:
            self._begin(kind, payload)

    def _begin(self, kind: bytes, name: bytes) -> None:
        if self._has_top and not is_plain_name(name):
            raise TreeError(f"the name {shown(_text([name]))} cannot be copied")
        if not self._has_top and name:
            raise TreeError("its top has a name")
        self._has_top = True
        self._count(name, ENTRY_BYTES)
        if kind == DIRECTORY:
            self._sink.begin_directory(name.decode())
            self._directories.append(name)
            return
        self._sink.begin_file(name.decode(), executable=kind == PROGRAM)
        self._file = name

    def _count(self, name: bytes, size: int) -> None:
        """Counts an entry, and checks its place."""
        path = [*self._directories[1:], name]
        if len(self._directories) >= MAX_DEPTH:
            raise TreeError(f"{shown(_text(path))} is nested more than {MAX_DEPTH} directories deep")
        if len(b"/".join(path)) > MAX_PATH_BYTES:
            raise TreeError(f"the path {shown(_text(path))} is longer than {MAX_PATH_BYTES} bytes")
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            raise TreeError(f"it has more than {MAX_ENTRIES} files and directories")
        self._count_bytes(size)

    def _count_bytes(self, size: int) -> None:
        self._bytes += size
        if self._bytes > LIMIT_BYTES:
            raise TreeError(f"it is larger than {LIMIT_BYTES >> 30} GiB")

    def _receive_piece(self, piece: bytes) -> None:
        self._count_bytes(len(piece))
        self._sink.write(piece)
        if len(piece) < PIECE_BYTES:
            self._sink.end_file()
            self._file = None
            self.files += 1


def _text(path: list[bytes]) -> str:
    """Returns a path as text, with what cannot be printed escaped."""
    text = b"/".join(path).decode(errors="backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
