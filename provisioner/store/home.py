"""The home directory's layout, atomic writes and locks. Knows nothing of what the files mean."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Home:
    """The provisioner home: PROVISIONER_HOME, by default `provisioner` in the XDG state directory.

    Args:
        root: the directory; made, with mode 0700, when something is first written.
    """

    root: Path

    @classmethod
    def default(cls) -> Home:
        """The home that the process's environment names (XDG Base Directory Specification 0.8)."""
        named = os.environ.get("PROVISIONER_HOME")
        if named:
            return cls(Path(named).expanduser().absolute())
        state = Path(os.environ.get("XDG_STATE_HOME") or "")
        # The XDG specification has relative paths ignored.
        return cls((state if state.is_absolute() else Path.home() / ".local" / "state") / "provisioner")

    @property
    def images(self) -> Path:
        """images/NAME/: one directory per finished image."""
        return self.root / "images"

    @property
    def locks(self) -> Path:
        """locks/: files that are locked and never read."""
        return self.root / "locks"

    @property
    def environments(self) -> Path:
        """environments/ID/: record, keys and, on the local cloud, machines of what lives now."""
        return self.root / "environments"

    @property
    def stacks(self) -> Path:
        """stacks/ID/: one Terraform root and its state."""
        return self.root / "stacks"

    @property
    def archive(self) -> Path:
        """archive/ID/: record and logs of what is gone. No key, no disk."""
        return self.root / "archive"

    @property
    def batches(self) -> Path:
        """batches/ID/: record, engine and results of a batch."""
        return self.root / "batches"

    @property
    def ledger(self) -> Path:
        """ledger.sqlite: what launches may cost and did cost."""
        return self.root / "ledger.sqlite"

    @property
    def identity(self) -> str:
        """A word for this home, the same for ever: what it makes in a cloud is tagged with it."""
        path = self.root / "id"
        with contextlib.suppress(FileNotFoundError):
            return path.read_text().strip()
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(self.locks / "home-id"):
            if not path.exists():
                write_atomically(path, secrets.token_hex(8))
        return path.read_text().strip()

    def make(self) -> None:
        """Makes the directories."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for directory in (self.images, self.locks, self.environments, self.stacks, self.archive, self.batches):
            directory.mkdir(mode=0o700, exist_ok=True)


def write_atomically(path: Path, data: str | bytes, mode: int = 0o600) -> None:
    """Writes a file so that a reader sees the old contents or the new ones, never a part.

    Args:
        path: its directory must exist.
        data: text (UTF-8) or bytes.
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


def remove_tree(directory: Path) -> None:
    """Removes a directory with all that is in it; nothing happens if it is not there.

    An ordinary user's build of a base image that was killed leaves files of subordinate ids, which only root of a
    user namespace can remove.

    Raises:
        OSError: it could not be removed.
    """
    shutil.rmtree(directory, ignore_errors=True)
    if directory.exists() and os.geteuid() != 0:
        argv = ["unshare", "--map-root-user", "--map-auto", "rm", "-rf", "--", str(directory)]
        subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
        )
    if directory.exists():
        shutil.rmtree(directory)


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
