"""Writes files completely or not at all, and measures and removes directory trees."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from provisioner import child_environment

# How often a directory is removed in which another process still writes.
REMOVALS = 5


def write_atomically(path: Path, data: str | bytes, mode: int = 0o600) -> None:
    """Replaces a file so that a reader sees either the old or the new contents, never a part.

    Args:
        path: the file; its directory must exist.
        data: text, written as UTF-8, or bytes.
        mode: permission bits of the file.
    """
    encoded = data.encode() if isinstance(data, str) else data
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(encoded)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Has a file's contents, or the names in a directory, outlive a crash of the host (fsync(2))."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_end(path: Path, limit_bytes: int) -> bytes:
    """Returns at most the last `limit_bytes` of a file, however long it is; nothing if there is no file.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            file.seek(-min(limit_bytes, file.seek(0, os.SEEK_END)), os.SEEK_END)
            return file.read(limit_bytes)  # it may be growing
    except FileNotFoundError:
        return b""


def disk_bytes(directory: Path) -> int:
    """Returns the disk space that a directory's files occupy, in bytes. What goes meanwhile does not count."""
    taken = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                taken += os.lstat(Path(parent, name)).st_blocks * 512
    return taken


def remove_tree(directory: Path) -> None:
    """Removes a directory tree. Does nothing if it does not exist.

    A killed build of a base image leaves files that belong to subordinate ids if an ordinary user ran it. Only root of
    a user namespace can remove those. What another process writes there meanwhile is removed, too.

    Raises:
        OSError: the tree could not be removed.
    """
    for _ in range(REMOVALS):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
    if os.geteuid() != 0:
        argv = ["unshare", "--map-root-user", "--map-auto", "rm", "-rf", "--", str(directory)]
        subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
            env=child_environment.for_program(os.environ),
        )  # fmt: skip
    if directory.exists():
        shutil.rmtree(directory)
