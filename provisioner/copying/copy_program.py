"""Sends a file tree out of a machine, or puts a received one in its place there. Runs in machines, started by transfer.

Its user may be root, and the directories another user's: everything is opened relative to a directory's descriptor, and
nothing is followed that the other user could swap; `fill` and `write` are for machines in which no other user is at
work. Imports the standard library alone, directories.py and unpack_program.py, and starts no program of the machine's.

A tree is sent as frames: a kind (1 byte), the payload's length (4 bytes, big-endian) and the payload. A file's contents
are pieces of PIECE_BYTES each, of which the last is shorter, and may be empty. The tree's top has no name.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import struct
import sys
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

from provisioner.copying.directories import LISTING_FLAGS, open_destination, open_directory, split, working_directory
from provisioner.copying.unpack_program import unpack

DIRECTORY, UP, FILE, PROGRAM, PIECE, SKIPPED, END = b"d", b"u", b"f", b"x", b"p", b"s", b"e"
PIECE_BYTES = 64 << 10
# The name of a copied tree's top until it is in its place.
TOP = "payload"
HEADER = struct.Struct(">cI")
# Far below the limits on recursion and open files. A tree that is nested deeper is no data.
MAX_DEPTH = 100
# A file of the receiver's is replaced at most this often, should another process keep creating it again.
ATTEMPTS = 10
# Another process has removed an entry, or replaced it by a link, a socket or an entry of the other kind.
SWAPPED = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO)
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def is_plain_name(name: bytes) -> bool:
    """Returns whether a name is one that can be copied: one component of UTF-8, without control characters."""
    try:
        text = name.decode()
    except UnicodeDecodeError:
        return False
    if name in (b"", b".", b"..") or b"/" in name:
        return False
    return text.isprintable() or not any(unicodedata.category(c) == "Cc" for c in text)


class TreeSender:
    """Writes a tree as frames. Sends the names of what it skips: links, special files, and names that are not plain.

    Args:
        out: where the frames go.
    """

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def send(self, path: str) -> None:
        """Sends a file or directory with everything below.

        Raises:
            OSError: something cannot be read, or is no file or directory.
        """
        parent, name = split(path)
        with open_directory(parent) as directory:
            if not self._send_entry(name, directory, b"", 1):
                raise OSError(0, "is neither a file nor a directory; links are not followed", path)
        self._frame(END)

    def _send_entry(self, name: str, directory: int, sent_name: bytes, depth: int) -> bool:
        """Sends a file or directory, and returns False for anything else, or if another process swaps it meanwhile."""
        kind = stat.S_IFMT(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFDIR):
            return False
        descriptor = os.open(name, FILE_FLAGS if kind == stat.S_IFREG else LISTING_FLAGS, dir_fd=directory)
        try:
            status = os.fstat(descriptor)
            if stat.S_IFMT(status.st_mode) != kind:
                return False
            if kind == stat.S_IFDIR:
                self._frame(DIRECTORY, sent_name)
                self._send_entries(descriptor, depth + 1)
                self._frame(UP)
            else:
                self._frame(PROGRAM if status.st_mode & stat.S_IXUSR else FILE, sent_name)
                self._send_contents(descriptor, status.st_size)
        except OSError as error:
            error.filename = f"{name}/{error.filename}" if isinstance(error.filename, str) else name
            raise
        finally:
            os.close(descriptor)
        return True

    def _send_entries(self, directory: int, depth: int) -> None:
        names = sorted(os.listdir(directory))
        if names and depth > MAX_DEPTH:
            raise OSError(0, f"is nested more than {MAX_DEPTH} directories deep", names[0])
        for name in names:
            encoded = os.fsencode(name)
            sent = False
            try:
                sent = is_plain_name(encoded) and self._send_entry(name, directory, encoded, depth)
            except OSError as error:
                if error.errno not in SWAPPED:
                    raise
            if not sent:
                self._frame(SKIPPED, encoded)

    def _send_contents(self, file: int, size: int) -> None:
        """Sends at most `size` bytes: another process may append for ever."""
        with open(file, "rb", closefd=False) as reader:
            while True:
                piece = reader.read(min(PIECE_BYTES, size))
                size -= len(piece)
                self._frame(PIECE, piece)
                if len(piece) < PIECE_BYTES:
                    return

    def _frame(self, kind: bytes, payload: bytes = b"") -> None:
        self._out.write(HEADER.pack(kind, len(payload)) + payload)


def receive(archive: BinaryIO, destination: str, name: str) -> None:
    """Unpacks an archive, whose only top is TOP, and puts that in the place of what was there.

    Args:
        archive: the archive; it need not be seekable.
        destination: the new path; in an existing directory, or with a / at its end, `name` is added.
        name: the source's name.

    Raises:
        OSError: the destination cannot be written, or the archive not be unpacked; nothing has changed there.
    """
    if destination.endswith("/"):
        with open_directory(destination, create=True):
            pass
    with open_destination(destination, name) as (parent, last):
        _replace(archive, parent, last)


def replace(archive: BinaryIO, path: str) -> None:
    """Unpacks an archive, whose only top is TOP, and puts that in the place of whatever has a path.

    Raises:
        OSError: as for receive.
    """
    parent, name = split(path)
    with open_directory(parent) as directory:
        _replace(archive, directory, name)


def _replace(archive: BinaryIO, parent: int, name: str) -> None:
    with working_directory(parent) as work:
        unpack(archive, work)
        _put(work, parent, name)


def _put(work: int, parent: int, name: str) -> None:
    """Moves the payload to its place, and what was there into the working directory."""
    for attempt in range(ATTEMPTS):
        old = f"old-{attempt}"
        with suppress(FileNotFoundError):
            os.rename(name, old, src_dir_fd=parent, dst_dir_fd=work)
        try:
            os.rename(TOP, name, src_dir_fd=work, dst_dir_fd=parent)
            return
        except OSError as error:
            failure = error
            with suppress(OSError):
                os.rename(old, name, src_dir_fd=work, dst_dir_fd=parent)
    raise failure


def fill(archive: BinaryIO, directory: str, keep: str = "") -> None:
    """Unpacks an archive into a directory, which is made if need be, as are those above it.

    Args:
        keep: if not empty, what the directory has already stays as it is.

    Raises:
        OSError: the directory cannot be written, or the archive not be unpacked.
    """
    os.makedirs(directory, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        unpack(archive, descriptor, keep=bool(keep))
    finally:
        os.close(descriptor)


def write(contents: BinaryIO, destination: str, name: str, mode: str) -> None:
    """Writes a file, through a link if there is one, and makes the directories above it.

    Args:
        contents: of the file.
        destination: its path; in an existing directory, or with a / at its end, `name` is added.
        name: the source's name.
        mode: the file's permissions, in octal digits.

    Raises:
        OSError: it cannot be written.
    """
    os.makedirs(os.path.dirname(destination) or ".", exist_ok=True)
    path = os.path.join(destination, name) if os.path.isdir(destination) else destination
    with open(path, "wb") as file:
        shutil.copyfileobj(contents, file)
        os.fchmod(file.fileno(), int(mode, 8))


COMMANDS: dict[str, Callable[..., None]] = {"receive": receive, "replace": replace, "fill": fill, "write": write}


def main(arguments: list[str]) -> int:
    """Runs `send PATH`, or one of COMMANDS with its arguments and stdin, and returns the exit code."""
    command, *rest = arguments
    try:
        if command == "send":
            with open(1, "wb", buffering=1 << 20) as out:
                TreeSender(out).send(*rest)
        else:
            with open(0, "rb", closefd=False) as received:
                COMMANDS[command](received, *rest)
        return 0
    except OSError as error:
        print(f"{error.filename}: {error.strerror}" if error.filename else error.strerror, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
