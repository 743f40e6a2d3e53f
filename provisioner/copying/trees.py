"""Reads the frames in which a machine sends a file tree (see copy_program.py), and writes the tree into a directory.

The machine is not trusted: all that is not plain is refused; names, depth, entries and bytes are bounded here. Nothing
is opened by a path that another process could swap.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Protocol, Self

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
    TOP,
    UP,
    is_plain_name,
)
from provisioner.copying.directories import LISTING_FLAGS
from provisioner.ssh.exec_frames import Frames

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
            self._count_bytes(len(payload))
            self._sink.write(payload)
            if len(payload) < PIECE_BYTES:
                self._sink.end_file()
                self._file = None
                self.files += 1
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
        else:
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


def _text(path: list[bytes]) -> str:
    """Returns a path as text, with what cannot be printed escaped."""
    text = b"/".join(path).decode(errors="backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# What a copy leaves free on its disk, so that it does not stop the controller's own work.
FREE_BYTES = 256 << 20
FREE_INODES = 10_000
# The disk is asked again after this much.
BYTES_BETWEEN_CHECKS = 16 << 20
# So many bytes does an entry count for in this, since an empty one takes an inode and a block.
WRITTEN_ENTRY_BYTES = 1 << 14
FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class DiskFullError(Exception):
    """Going on would fill the disk."""


class TreeWriter:
    """Creates the files and directories of a tree. Use as a context manager.

    Only contents and the permission to execute are kept. Nothing that exists is written to.

    Args:
        directory: the descriptor of an empty directory, in which the top is created.

    Raises:
        TreeError: a name comes twice in one directory, or cannot be written.
        DiskFullError: the disk is nearly full.
    """

    def __init__(self, directory: int) -> None:
        self._directories = [directory]
        self._file: int | None = None
        self._unchecked_bytes = BYTES_BETWEEN_CHECKS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
        while len(self._directories) > 1:
            self.end_directory()

    def begin_directory(self, name: str) -> None:
        """Creates a directory. What follows is created inside it, until it ends."""
        self._require_space(WRITTEN_ENTRY_BYTES)
        with _named(name):
            os.mkdir(name or TOP, dir_fd=self._directories[-1])
            self._directories.append(os.open(name or TOP, LISTING_FLAGS, dir_fd=self._directories[-1]))

    def end_directory(self) -> None:
        """Ends the innermost directory."""
        os.close(self._directories.pop())

    def begin_file(self, name: str, *, executable: bool) -> None:
        """Creates a file."""
        self._require_space(WRITTEN_ENTRY_BYTES)
        with _named(name):
            mode = 0o777 if executable else 0o666
            self._file = os.open(name or TOP, FILE_FLAGS, mode, dir_fd=self._directories[-1])

    def write(self, data: bytes) -> None:
        """Writes a piece of the file's contents."""
        assert self._file is not None
        self._require_space(len(data))
        with _named("a file's contents"):
            while data:
                data = data[os.write(self._file, data) :]

    def end_file(self) -> None:
        """Ends the file."""
        assert self._file is not None
        file, self._file = self._file, None
        with _named("a file's contents"):
            os.close(file)

    def _require_space(self, size: int) -> None:
        self._unchecked_bytes += size
        if self._unchecked_bytes < BYTES_BETWEEN_CHECKS:
            return
        self._unchecked_bytes = 0
        disk = os.fstatvfs(self._directories[0])
        # Some file systems, such as btrfs, have no fixed number of inodes, and say 0.
        has_inodes = disk.f_files == 0 or disk.f_favail >= FREE_INODES
        if disk.f_bavail * disk.f_frsize < FREE_BYTES or not has_inodes:
            raise DiskFullError


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Turns an error of the operating system into one of ours, which names what is written."""
    try:
        yield
    except FileExistsError:
        raise TreeError(f"{shown(name)} comes twice in one directory") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError from None
        raise TreeError(f"{shown(name)} could not be written: {error.strerror}") from error
