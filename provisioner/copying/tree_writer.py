"""Writes a file tree from a machine into a directory, with nothing opened by a path that another process could swap."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Self

from provisioner.base.validation import shown
from provisioner.copying.copy_program import TOP
from provisioner.copying.directories import LISTING_FLAGS
from provisioner.copying.tree_reader import TreeError

# What a copy leaves free on its disk, so that it does not stop the controller's own work.
FREE_BYTES = 256 << 20
FREE_INODES = 10_000
# The disk is asked again after this much.
BYTES_BETWEEN_CHECKS = 16 << 20
# So many bytes does an entry count for in this, since an empty one takes an inode and a block.
ENTRY_BYTES = 1 << 14
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
        self._require_space(ENTRY_BYTES)
        with _named(name):
            os.mkdir(name or TOP, dir_fd=self._directories[-1])
            self._directories.append(os.open(name or TOP, LISTING_FLAGS, dir_fd=self._directories[-1]))

    def end_directory(self) -> None:
        """Ends the innermost directory."""
        os.close(self._directories.pop())

    def begin_file(self, name: str, *, executable: bool) -> None:
        """Creates a file."""
        self._require_space(ENTRY_BYTES)
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
