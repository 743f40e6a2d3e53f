"""Opens directories step by step, following only links that no other user can have planted, and works inside them.

Runs in machines as well (see copy_program.py), so it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator

# O_PATH: a directory that may be passed through may be unreadable.
DIRECTORY_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
LISTING_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Each directory on the way is kept open, for `..`. Also ends loops of links.
MAX_COMPONENTS = 200
# Another user's processes in a tree that is removed may add to it for ever.
REMOVAL_SECONDS = 300.0


@contextlib.contextmanager
def open_directory(path: str, *, create: bool = False) -> Iterator[int]:
    """Opens a directory for use as `dir_fd`.

    Follows a symbolic link only where no user but root and this process's could have placed it: in a directory of
    theirs that others cannot write to, on a way that others cannot change.

    Args:
        path: the directory.
        create: whether to create missing directories.

    Raises:
        OSError: there is no such directory, or the way leads through a link that others could have placed.
    """
    pending = os.path.join(os.getcwd(), path).split("/")[::-1]
    with contextlib.ExitStack() as closing:
        way = [_enter("/", None, closing)]
        components = 0
        while pending:
            components += 1
            if components > MAX_COMPONENTS:
                raise OSError(errno.ELOOP, f"has more than {MAX_COMPONENTS} components, with those of links", path)
            pending += _step(pending.pop(), way, closing, create=create)
        yield way[-1]


def _step(name: str, way: list[int], closing: contextlib.ExitStack, *, create: bool) -> list[str]:
    """Goes one step on the way from /, and returns the steps of a link's target, the last first."""
    if name == "..":  # not the kernel's `..`, which others could move
        del way[max(1, len(way) - 1) :]
    elif name not in ("", "."):
        try:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=way[-1])
            way.append(_enter(name, way[-1], closing))
        except NotADirectoryError:
            target = _link_target(name, way)
            if target.startswith("/"):
                del way[1:]
            return target.split("/")[::-1]
    return []


def _enter(name: str, directory: int | None, closing: contextlib.ExitStack) -> int:
    descriptor = os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
    closing.callback(os.close, descriptor)
    return descriptor


def _link_target(name: str, way: list[int]) -> str:
    """Returns where a link leads.

    Raises:
        NotADirectoryError: it is no link.
        OSError: others could have placed the link.
    """
    try:
        target = os.readlink(name, dir_fd=way[-1])
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name) from None
        raise
    *passed, last = (os.fstat(directory) for directory in way)
    if not _is_ours(last) or not all(_is_ours(status) or _is_our_sticky(status) for status in passed):
        raise OSError(errno.ELOOP, "is a symbolic link that others could have placed", name)
    return target


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_our_sticky(status: os.stat_result) -> bool:
    """Returns whether others cannot rename our entries in a directory that they can write to. Its owner always can."""
    return status.st_uid in (0, os.geteuid()) and bool(status.st_mode & stat.S_ISVTX)


def split(path: str) -> tuple[str, str]:
    """Splits a path into its parent's and its own name, without following anything."""
    parent, name = os.path.split(path.rstrip("/"))
    return parent or ("/" if path.startswith("/") else "."), name or "."


@contextlib.contextmanager
def open_destination(path: str, name: str) -> Iterator[tuple[int, str]]:
    """Opens the directory in which a copy is to be placed.

    Args:
        path: a directory, or the copy's own path.
        name: the copy's name if `path` is a directory.

    Returns:
        the directory's descriptor, and the copy's name in it.

    Raises:
        OSError: as for open_directory.
    """
    with contextlib.ExitStack() as closing:
        try:
            directory = closing.enter_context(open_directory(path))
        except (FileNotFoundError, NotADirectoryError):
            parent, name = split(path)
            directory = closing.enter_context(open_directory(parent))
        yield directory, name


@contextlib.contextmanager
def working_directory(parent: int) -> Iterator[int]:
    """Creates a directory that only this process's user can enter, and removes it with all that is left in it.

    Args:
        parent: the descriptor of the directory to create it in, which others may be able to write to.

    Raises:
        OSError: it cannot be created, or others have replaced it at once.
    """
    name = f".copy.{os.urandom(8).hex()}"
    try:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except OSError as error:
            raise OSError(error.errno, error.strerror) from None
        descriptor = os.open(name, LISTING_FLAGS, dir_fd=parent)
        try:
            status = os.fstat(descriptor)
            if status.st_uid != os.geteuid() or status.st_mode & 0o077 or os.listdir(descriptor):
                raise OSError(errno.EPERM, "was replaced while in use", name)
            try:
                yield descriptor
            finally:
                _empty(descriptor)
        finally:
            os.close(descriptor)
    finally:
        # By name, so only if it is empty: others may have put something else there.
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=parent)


def _empty(directory: int) -> None:
    """Removes what can be removed of all that is in a directory, however deeply it is nested, for REMOVAL_SECONDS."""
    pending = os.listdir(directory)
    prefix, number = os.urandom(8).hex(), 0
    deadline = time.monotonic() + REMOVAL_SECONDS
    while pending and time.monotonic() < deadline:
        name, number = pending.pop(), number + 1
        if not _removed(name, directory):
            with contextlib.suppress(OSError):
                pending += _bring_up(name, directory, f"{prefix}-{number}")
                os.rmdir(name, dir_fd=directory)


def _bring_up(name: str, directory: int, prefix: str) -> list[str]:
    """Empties a subdirectory: moves what it cannot remove up into `directory`, and returns the new names."""
    _allow_all(name, directory)
    below = os.open(name, LISTING_FLAGS, dir_fd=directory)
    brought = []
    try:
        for number, entry in enumerate(os.listdir(below)):
            if not _removed(entry, below):
                _allow_all(entry, below)
                with contextlib.suppress(OSError):
                    os.rename(entry, f"{prefix}-{number}", src_dir_fd=below, dst_dir_fd=directory)
                    brought.append(f"{prefix}-{number}")
    finally:
        os.close(below)
    return brought


def _allow_all(name: str, directory: int) -> None:
    """Lets this user list, empty and move a subdirectory: rename(2) moves only a writable one to another parent."""
    if os.geteuid() == 0:  # needs no permission, and must not change the mode of what is mounted there
        return
    with contextlib.suppress(OSError):
        descriptor = os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
        try:
            os.chmod(f"/proc/self/fd/{descriptor}", 0o700)
        finally:
            os.close(descriptor)


def _removed(name: str, directory: int) -> bool:
    """Removes an entry, unless it is a directory with something in it; returns whether it did."""
    with contextlib.suppress(OSError):
        try:
            os.unlink(name, dir_fd=directory)
        except IsADirectoryError:
            os.rmdir(name, dir_fd=directory)
        return True
    return False
