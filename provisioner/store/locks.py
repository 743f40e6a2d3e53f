"""Locks files, until the process ends at the latest, and holds leases: no sweep removes a leased environment.

Finds the processes that have a file locked or open, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO

# The pause between two attempts to take a lock, where the wait has a limit.
LOOK_SECONDS = 0.1


@contextlib.contextmanager
def locked(
    path: Path,
    on_wait: Callable[[], None] | None = None,
    wait_seconds: float | None = None,
    *,
    make_parents: bool = True,
) -> Iterator[None]:
    """Holds an exclusive lock on a file. The kernel releases it when this process ends, however it ends.

    Args:
        path: the lock file; created if it does not exist, never removed.
        on_wait: called once if another process holds the lock.
        wait_seconds: how long to wait for another process; None for as long as it takes.
        make_parents: whether the file's directory is made. Not for one that another process may be removing.

    Raises:
        TimeoutError: another process held the lock all the time.
        FileNotFoundError: the directory is gone, and is not to be made.
    """
    if make_parents:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait:
                on_wait()
            if wait_seconds is None:
                fcntl.flock(file, fcntl.LOCK_EX)
            else:
                _lock_within(file, wait_seconds)
        yield


def _lock_within(file: IO[str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process still holds it after {seconds:g} seconds") from None
        time.sleep(LOOK_SECONDS)


def is_locked(path: Path) -> bool:
    """Returns whether a process holds the lock on `path`."""
    try:
        with path.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def holders(path: Path) -> list[int]:
    """Returns the ids of our user's processes that hold a lock on a file. Unlike a pid file, this is never out of date.

    Processes that wait for the lock, or have the file open to read it, are not listed.
    """
    return sorted({pid for pid, descriptor in _open_descriptors(path) if _is_locked_by(pid, descriptor)})


def openers(path: Path) -> list[int]:
    """Returns the ids of our user's processes that have a file open."""
    return sorted({pid for pid, _ in _open_descriptors(path)})


def _open_descriptors(path: Path) -> Iterator[tuple[int, str]]:
    """Yields each descriptor of a file with its process."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return
    for process in Path("/proc").glob("[0-9]*"):
        # Processes may end or close files in the meantime, and those of other users cannot be inspected.
        with contextlib.suppress(OSError), os.scandir(process / "fd") as descriptors:
            for descriptor in descriptors:
                with contextlib.suppress(OSError):
                    if os.path.samestat(descriptor.stat(), status):
                        yield int(process.name), descriptor.name


def _is_locked_by(pid: int, descriptor: str) -> bool:
    with contextlib.suppress(OSError):
        return b"\nlock:" in Path(f"/proc/{pid}/fdinfo/{descriptor}").read_bytes()  # proc(5)
    return False


RENEW_SECONDS = 120.0
# How long it waits for another process before it looks whether the lease is still wanted.
ROUND_SECONDS = 1.0
# Several renewals may fail before other controllers consider the environment abandoned.
LEASE = timedelta(minutes=10)


class Leases:
    """The leases that one process holds."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Callable[[], None], contextlib.ExitStack]] = {}
        # The takes that wait for a file's lock, each with a mark of its own.
        self._taking: dict[str, object] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def take(self, environment_id: str, path: Path, renew: Callable[[], None]) -> None:
        """Takes an environment's lease, and waits while another process has it.

        Does nothing if this process already has it, or if another thread releases it during the wait.

        Args:
            environment_id: the environment.
            path: the file to lock.
            renew: renews the lease in the cloud; called regularly.
        """
        mark = object()
        with self._changed:
            self._changed.wait_for(lambda: environment_id not in self._taking)
            if environment_id in self._held:
                return
            self._taking[environment_id] = mark
        try:
            while self._taking.get(environment_id) is mark:  # else it was released during the wait
                with contextlib.ExitStack() as stack:
                    try:
                        stack.enter_context(locked(path, wait_seconds=ROUND_SECONDS))
                    except TimeoutError as error:
                        if error.errno is not None:  # the file system's, not the lock's
                            raise
                        continue
                    with self._changed:
                        if self._taking.get(environment_id) is mark:
                            self._held[environment_id] = (renew, stack.pop_all())
                            self._begin_renewing()
                            return
        finally:
            with self._changed:
                if self._taking.get(environment_id) is mark:
                    del self._taking[environment_id]
                self._changed.notify_all()

    def held(self) -> list[str]:
        """Returns the ids of the environments whose leases this process has."""
        with self._changed:
            return list(self._held)

    def _begin_renewing(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_renewing, name="leases", daemon=True)
            self._thread.start()

    def release(self, environment_id: str) -> None:
        """Gives up an environment's lease, also one that a thread still waits for. Does nothing if there is none."""
        with self._changed:
            self._taking.pop(environment_id, None)
            self._changed.notify_all()
            _, stack = self._held.pop(environment_id, (None, contextlib.ExitStack()))
        stack.close()

    def _keep_renewing(self) -> None:
        pause = threading.Event()
        while not pause.wait(RENEW_SECONDS):
            with self._changed:
                if not self._held:
                    self._thread = None
                    return
                renewals = [renew for renew, _ in self._held.values()]
            for renew in renewals:
                # Whatever goes wrong with one, the others are renewed, and the next round tries it again.
                with contextlib.suppress(Exception):
                    renew()
