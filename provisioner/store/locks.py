"""Locks that the kernel frees however their holder ends, and who has a file open."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Holds an exclusive lock on a file. The kernel frees it when this process ends, however it ends.

    Args:
        path: the lock file; made where it is missing, never removed.
        on_wait: called once if somebody else holds the lock.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait:
                on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock on `path`."""
    try:
        with path.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def holders(path: Path) -> list[int]:
    """The processes of ours that have a file open. Unlike a pid file, this never names a stranger."""
    try:
        wanted = path.stat()
    except FileNotFoundError:
        return []
    return [int(process.name) for process in Path("/proc").glob("[0-9]*") if _has_open(process, wanted)]


def _has_open(process: Path, wanted: os.stat_result) -> bool:
    # Processes end, and close files, while we look; those of other users do not let us.
    with contextlib.suppress(OSError), os.scandir(process / "fd") as descriptors:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                if os.path.samestat(descriptor.stat(), wanted):
                    return True
    return False
