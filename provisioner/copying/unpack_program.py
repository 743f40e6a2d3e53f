"""Unpacks a tar archive into a directory. Runs in machines, as a part of copy_program.py.

The machine's own `tar` is not used: an agent that is root there may have replaced it. Keeps what GNU tar keeps: modes,
times, symbolic and hard links; as root, the special permissions too. Imports the standard library alone, and uses none
of tarfile's filters, which Debian 12's does not have.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

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
            self._add_directory(member, path)
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
                self._make_parents(path)
        return create()

    def _remove(self, path: str) -> None:
        """Removes what has a path, but no directory with anything in it."""
        try:
            os.unlink(path, dir_fd=self._top)
        except IsADirectoryError:
            os.rmdir(path, dir_fd=self._top)
        except FileNotFoundError:
            pass

    def _make_parents(self, path: str) -> None:
        for end in [place for place, letter in enumerate(path) if letter == "/"]:
            with suppress(FileExistsError):
                os.mkdir(path[:end], dir_fd=self._top)

    def _add_directory(self, member: tarfile.TarInfo, path: str) -> None:
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(path, dir_fd=self._top).st_mode):
                return
        self._place(path, lambda: os.mkdir(path, 0o700, dir_fd=self._top))
        self._unfinished.append((path, member))

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
