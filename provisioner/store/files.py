"""Writes files completely or not at all, locks them, holds leases, and measures and removes trees."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO, BinaryIO

from provisioner.base import child_environment

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
    """Writes a file's contents, or the names in a directory, to the disk, so that they outlive a crash of the host."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_plain(path: Path) -> BinaryIO:
    """Opens a file to read it, where a hostile program may have put something else: a link, or a pipe without an end.

    Raises:
        OSError: it is no plain file, or cannot be read.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "no plain file", str(path))
    return file


def read_end(path: Path, limit_bytes: int) -> bytes:
    """Returns at most the last `limit_bytes` of a file, however long it is; nothing if there is no file.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with open_plain(path) as file:
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
        status = path.lstat()  # of a link that a hostile program made, not of what it leads to
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
        # The calls of take() that wait for a file's lock, each with its mark.
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
