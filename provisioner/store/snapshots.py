"""Keeps snapshots: environments that were frozen while they ran. One directory each, either complete or absent.

Freezes nothing: the clouds do.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import AwareDatetime

from provisioner.base import strict_json
from provisioner.base.errors import InfrastructureError, UsageError
from provisioner.base.models import Environment, Record, Role
from provisioner.ssh.keys import KeyPair
from provisioner.store.files import disk_bytes, locked, remove_tree, sync, write_atomically
from provisioner.store.home import UNFINISHED, Home

RECORD = "snapshot.json"
KEYS = "keys"
NAME = re.compile("[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class Snapshot(Record):
    """The record of a snapshot.

    Args:
        frozen_at: the moment from which copies resume.
        environment: the record of the environment in that moment.
        needs: what the machines' states depend on, in the cloud's own terms: copies run only where all of it is alike.
        attended: whether the process that made it removes it. If that process has ended, a sweep does.
    """

    name: str
    frozen_at: AwareDatetime
    environment: Environment
    needs: dict[str, str]
    attended: bool = False


class SnapshotStore:
    """The snapshots directory of a home."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def path(self, name: str) -> Path:
        """Returns snapshots/NAME."""
        return self._home.snapshots / name

    @contextlib.contextmanager
    def making(self, name: str, on_wait: Callable[[], None]) -> Iterator[Path]:
        """Yields an empty directory for a new snapshot, which is removed afterwards unless it was finished.

        Args:
            on_wait: called if another command is making a snapshot of this name.

        Raises:
            UsageError: the name is taken, or cannot be one.
        """
        if not NAME.fullmatch(name):
            raise UsageError(
                "A snapshot's name has up to 64 letters, digits, hyphens and underscores, and begins with a letter or "
                "digit."
            )
        self._home.snapshots.mkdir(mode=0o700, exist_ok=True)
        with locked(self._lock(name), on_wait=on_wait):
            if self.path(name).exists():
                raise UsageError(
                    f"There is a snapshot {name} already.", hint=f"`provisioner snapshot remove {name}` removes it."
                )
            directory = self._unfinished(name)
            remove_tree(directory)
            directory.mkdir(mode=0o700)
            try:
                yield directory
            finally:
                remove_tree(directory)

    def finish(self, snapshot: Snapshot, keys: Path) -> None:
        """Turns what was made into the snapshot, atomically.

        Args:
            keys: the keys of the environment, by which the controller and its copies first recognise each other.
        """
        directory = self._unfinished(snapshot.name)
        (directory / KEYS).mkdir(mode=0o700)
        for key in keys.iterdir():
            write_atomically(directory / KEYS / key.name, key.read_bytes())
        write_atomically(directory / RECORD, snapshot.model_dump_json(indent=2))
        for parent in (directory / KEYS, directory):
            sync(parent)
        directory.rename(self.path(snapshot.name))
        sync(self._home.snapshots)

    def load(self, name: str) -> Snapshot:
        """Returns the record of a snapshot.

        Raises:
            UsageError: there is no such snapshot.
            InfrastructureError: its record cannot be read.
        """
        path = self.path(name) / RECORD
        if not NAME.fullmatch(name) or not path.exists():
            raise _no_snapshot(name)
        try:
            return strict_json.load_file(Snapshot, path)
        except (OSError, ValueError, MemoryError, RecursionError) as error:
            raise InfrastructureError(
                f"The record {path} cannot be read: {type(error).__name__}.",
                hint=f"It is damaged, or of another version. `provisioner snapshot remove {name}` removes it.",
                details=str(error)[:2000],
            ) from error

    def all(self) -> list[Snapshot]:
        """Returns all snapshots, oldest first.

        Raises:
            InfrastructureError: a record cannot be read.
        """
        snapshots = []
        for path in self._home.snapshots.glob(f"[!.]*/{RECORD}"):
            with contextlib.suppress(UsageError):  # removed in this moment
                snapshots.append(self.load(path.parent.name))
        return sorted(snapshots, key=lambda snapshot: (snapshot.frozen_at, snapshot.name))

    def attended(self) -> list[str]:
        """Returns the names of the attended snapshots whose records can be read."""
        names = []
        for path in self._home.snapshots.glob(f"[!.]*/{RECORD}"):
            with contextlib.suppress(UsageError, InfrastructureError):
                if self.load(path.parent.name).attended:
                    names.append(path.parent.name)
        return sorted(names)

    def lease(self, name: str) -> Path:
        """Returns the file that a process locks while it attends to a snapshot."""
        return self._home.locks / f"lease-snapshot-{name}"

    def disk_bytes(self, name: str) -> int:
        """Returns the disk space that a snapshot occupies, in bytes."""
        return disk_bytes(self.path(name))

    def machine(self, name: str, role: Role) -> Path:
        """Returns the directory with the files of a frozen machine."""
        return self.path(name) / role

    def key(self, name: str, key: str) -> KeyPair:
        """Reads a key pair of the frozen environment."""
        path = self.key_path(name, key)
        return KeyPair(path.read_text(), path.with_suffix(".pub").read_text().strip())

    def key_path(self, name: str, key: str) -> Path:
        """Returns the file of a private key of the frozen environment."""
        return self.path(name) / KEYS / key

    def held(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Keeps other processes from removing a snapshot for as long as the context lasts."""
        return locked(self._lock(name))

    def remove(self, name: str, require_unused: Callable[[], None] = lambda: None) -> None:
        """Removes a snapshot, whole or damaged.

        Args:
            require_unused: raises if it is in use. Called while no process can begin to use it.

        Raises:
            UsageError: there is none.
        """
        if not NAME.fullmatch(name) or not self.path(name).is_dir():
            raise _no_snapshot(name)
        with self.held(name):
            if not self.path(name).is_dir():  # another command was quicker
                raise _no_snapshot(name)
            require_unused()
            remove_tree(self._unfinished(name))
            self.path(name).rename(self._unfinished(name))
            remove_tree(self._unfinished(name))

    def remove_unfinished(self) -> list[str]:
        """Removes what commands that were cut short have left, and returns its names."""
        removed = []
        for path in self._home.snapshots.glob(f"{UNFINISHED}*"):
            # What is locked is being made, or removed by another.
            with (
                contextlib.suppress(TimeoutError),
                locked(self._lock(path.name.removeprefix(UNFINISHED)), wait_seconds=0),
            ):
                if path.exists():  # it was not finished meanwhile
                    remove_tree(path)
                    removed.append(path.name)
        return removed

    def _unfinished(self, name: str) -> Path:
        return self._home.snapshots / f"{UNFINISHED}{name}"

    def _lock(self, name: str) -> Path:
        return self._home.locks / f"snapshot-{name}"


def _no_snapshot(name: str) -> UsageError:
    return UsageError(f"There is no snapshot {name!r}.", hint="`provisioner snapshot list` shows all snapshots.")
