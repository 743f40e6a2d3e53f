"""Sends a file tree out of a machine, or puts a received one in its place there. Runs in machines, started by transfer.

Its user may be root, and the directories another user's: everything is opened relative to a directory's descriptor, and
nothing is followed that the other user could swap; `fill` and `write` are for machines in which no other user is at
work. Imports the standard library and directories.py alone, and starts no program of the machine's: an agent that is
root there may have replaced `tar`. Unpacking keeps what GNU tar keeps: modes, times, symbolic and hard links; as root,
the special permissions too. It uses none of tarfile's filters, which Debian 12's does not have.

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
import tarfile
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

from provisioner.copying.directories import LISTING_FLAGS, open_destination, open_directory, split, working_directory

COPY_BYTES = 64 << 10
# What is in a member's way is removed at most this often, should another process keep creating it again.
REMOVALS = 10
# What other users than root get of a member's mode, as by umask 022.
MODE_FOR_OTHERS = 0o755
ENTRY_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


class _Member(tarfile.TarInfo):
    """A member of an archive that has an end: tarfile itself takes a damaged or missing header for the end."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _Member:
        """Reads the next member."""
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if isinstance(error, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
                raise
            raise tarfile.ReadError(str(error)) from None


def unpack(stream: BinaryIO, top: int, *, keep: bool = False) -> None:
    """Unpacks an archive, in memory that does not grow with it. The files belong to this process's user.

    Files and links replace what has their name. A directory that exists keeps its mode, and may be a link to one.

    Args:
        stream: the archive, which need not be seekable.
        top: the descriptor of the directory to unpack it in.
        keep: whether files and links stay that have a member's name.

    Raises:
        OSError: the archive is damaged or incomplete; or a member, which the error names, cannot be written, leads out
            of the directory, or is not a file, directory, link or FIFO.
    """
    unpacker = _Unpacker(top, keep)
    try:
        with tarfile.open(
            fileobj=stream, mode="r|", tarinfo=_Member, encoding="utf-8", errors="surrogateescape"
        ) as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # it would keep them all
                unpacker.add(archive, member)
    except tarfile.TarError as error:
        raise OSError(errno.EBADMSG, f"the archive cannot be unpacked: {error}") from None
    unpacker.finish("")


class _Unpacker:
    """Writes members below a directory.

    Args:
        top: the directory's descriptor.
        keep: as for unpack.
    """

    def __init__(self, top: int, keep: bool) -> None:
        self._top = top
        self._keep = keep
        self._mode_mask = 0o7777 if os.geteuid() == 0 else MODE_FOR_OTHERS
        # New directories. They get modes and times last: a mode may forbid writing, and writing changes the times.
        self._unfinished: list[tuple[str, tarfile.TarInfo]] = []

    def add(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Writes a member.

        Raises:
            OSError: it cannot be written; with its name.
        """
        try:
            path = _inside(member.name)
            self.finish(path)
            if path:
                self._write(archive, member, path)
            elif not member.isdir():
                raise OSError(errno.EINVAL, "has no name")
        except OSError as error:
            raise OSError(error.errno, error.strerror, member.name) from None

    def finish(self, path: str) -> None:
        """Gives the directories that a path does not lead through their modes and times."""
        while self._unfinished and not path.startswith(f"{self._unfinished[-1][0]}/"):
            self._set_status_of(*self._unfinished.pop())

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        if member.isdir():
            with suppress(FileNotFoundError):
                if stat.S_ISDIR(os.stat(path, dir_fd=self._top).st_mode):
                    return
            self._place(path, lambda: os.mkdir(path, 0o700, dir_fd=self._top))
            self._unfinished.append((path, member))
        elif member.isreg():
            self._place(path, lambda: self._add_file(archive, member, path))
        elif member.issym():
            self._place(path, lambda: os.symlink(member.linkname, path, dir_fd=self._top))
            os.utime(path, (member.mtime, member.mtime), dir_fd=self._top, follow_symlinks=False)
        elif member.islnk():
            same = {"src_dir_fd": self._top, "dst_dir_fd": self._top}
            first = _inside(member.linkname)
            self._place(path, lambda: os.link(first, path, **same, follow_symlinks=False))
        elif member.isfifo():
            self._place(path, lambda: os.mkfifo(path, 0o600, dir_fd=self._top))
            self._set_status_of(path, member)
        else:
            raise OSError(errno.EINVAL, "is neither a file nor a directory, link or FIFO")

    def _place(self, path: str, create: Callable[[], None]) -> None:
        """Creates an entry, with the directories above it, in the place of what was there."""
        for _ in range(REMOVALS):
            try:
                return create()
            except FileExistsError:
                if self._keep:
                    return None
                self._remove(path)
            except FileNotFoundError:
                for end in [place for place, letter in enumerate(path) if letter == "/"]:
                    with suppress(FileExistsError):
                        os.mkdir(path[:end], dir_fd=self._top)
        return create()

    def _remove(self, path: str) -> None:
        """Removes what has a path, but no directory with anything in it."""
        try:
            os.unlink(path, dir_fd=self._top)
        except IsADirectoryError:
            os.rmdir(path, dir_fd=self._top)
        except FileNotFoundError:
            pass

    def _add_file(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | ENTRY_FLAGS
        with open(os.open(path, flags, 0o600, dir_fd=self._top), "wb") as file:
            contents = archive.extractfile(member)
            while contents and (data := contents.read(COPY_BYTES)):
                file.write(data)
            file.flush()
            self._set_status(file.fileno(), member)

    def _set_status_of(self, path: str, member: tarfile.TarInfo) -> None:
        """Gives a new directory or FIFO its mode and times."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | ENTRY_FLAGS, dir_fd=self._top)
        try:
            self._set_status(descriptor, member)
        finally:
            os.close(descriptor)

    def _set_status(self, descriptor: int, member: tarfile.TarInfo) -> None:
        os.fchmod(descriptor, member.mode & self._mode_mask)
        os.utime(descriptor, (member.mtime, member.mtime))


def _inside(name: str) -> str:
    """Returns a member's path below the directory, without what changes nothing.

    Raises:
        OSError: it leads out of the directory, or is no path.
    """
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise OSError(errno.EINVAL, "leads out of its directory")
    return "/".join(parts)


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
