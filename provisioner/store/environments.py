"""Keeps the records of environments: written before anything is created, archived after everything is gone."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

from provisioner.base import strict_json
from provisioner.base.errors import DamagedRecordError, HostError, UsageError
from provisioner.base.models import Environment, Role
from provisioner.base.progress import SURVIVABLE
from provisioner.base.validation import shown
from provisioner.ssh.keys import KeyPair, Login
from provisioner.store.files import is_locked, locked, remove_tree, sync, write_atomically
from provisioner.store.home import Home

RECORD = "environment.json"
# Locked while a record is read, changed and written, which takes milliseconds. A stopped process may hold it for good.
RECORD_LOCK = "environment.lock"
RECORD_WAIT_SECONDS = 30.0
DETAILS_CHARACTERS = 2000
RECORDING_SUFFIXES = (".cast", ".pcap")
# No vowels and no look-alikes, since people read ids aloud and type them.
ID_ALPHABET = "bcdfghjkmnpqrstvwxz23456789"
ID_DIGITS = 6
# Enough digits that the ten thousand runs of a batch have different ids.
DERIVED_DIGITS = 10


def new_id(family: str, task: str | None) -> str:
    """Returns a new environment id: readable, and safe as a file name and a Terraform key."""
    return _id(family, task, "".join(secrets.choice(ID_ALPHABET) for _ in range(ID_DIGITS)))


def derived_id(family: str, task: str | None, seed: str) -> str:
    """Returns the environment id that belongs to a seed: the same seed always gives the same id."""
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest())
    digits = []
    for _ in range(DERIVED_DIGITS):
        number, digit = divmod(number, len(ID_ALPHABET))
        digits.append(ID_ALPHABET[digit])
    return _id(family, task, "".join(digits))


def _id(family: str, task: str | None, suffix: str) -> str:
    words = [re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:20].strip("-") for text in (family, task or "")]
    return "-".join([word for word in words if word] + [suffix])


def refuse_ending(environment: Environment) -> None:
    """Keeps an environment from being worked in while it is destroyed.

    Raises:
        UsageError: its destruction has begun.
    """
    if environment.is_ending:
        raise UsageError(
            f"The destruction of {environment.id} has begun: it cannot be used any more.",
            hint=f"`provisioner destroy {environment.id}` ends it.",
        )


class EnvironmentStore:
    """The environments and archive directories of a home."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def directory(self, environment_id: str) -> Path:
        """Returns environments/ID, the environment's directory."""
        return self._home.environments / environment_id

    def logs(self, environment_id: str) -> Path:
        """Returns the directory of an environment's logs, live or archived."""
        live = self.live_logs(environment_id)
        return live if live.exists() else self.archived_logs(environment_id)

    def live_logs(self, environment_id: str) -> Path:
        """Returns the directory of an environment's logs while it exists."""
        return self.directory(environment_id) / "logs"

    def fetched_logs(self, environment_id: str) -> Path:
        """Returns the directory of what `logs` has fetched of machines that still run. Goes with the environment."""
        return self.directory(environment_id) / "fetched"

    def archived_logs(self, environment_id: str) -> Path:
        """Returns the directory of the logs that are left of an environment once it has been destroyed."""
        return self._home.archive / environment_id / "logs"

    def lock(self, environment_id: str) -> Path:
        """Returns the file that a process locks while it changes the environment."""
        return self._home.locks / f"environment-{environment_id}"

    def lease(self, environment_id: str) -> Path:
        """Returns the file that a command locks while it looks after the environment."""
        return self._home.locks / f"lease-{environment_id}"

    def is_attended(self, environment_id: str) -> bool:
        """Returns whether a running process looks after the environment, or changes it."""
        return is_locked(self.lease(environment_id)) or is_locked(self.lock(environment_id))

    def save(self, environment: Environment) -> Environment:
        """Writes the record atomically and creates the environment's directory if it does not exist yet."""
        directory = self.directory(environment.id)
        self.live_logs(environment.id).mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(directory / RECORD, environment.model_dump_json(indent=2))
        return environment

    def update(self, environment: Environment, **changes: Any) -> Environment:
        """Changes fields of the environment's record as it is on disk now.

        The other fields of the record given do not count: another process may have changed them.

        Returns:
            the changed record.

        Raises:
            UsageError: the environment has been destroyed, or its destruction has begun and it would be ready again.
            DamagedRecordError: the record on disk cannot be read.
            HostError: another process held the record's lock for RECORD_WAIT_SECONDS.
        """
        directory = self.directory(environment.id)
        try:
            # The directory is never made here: a destruction may have removed it.
            with locked(directory / RECORD_LOCK, wait_seconds=RECORD_WAIT_SECONDS, make_parents=False):
                current = self._read(directory / RECORD)
                if changes.get("status") == "ready":
                    refuse_ending(current)
                current = current.model_copy(update=changes)
                write_atomically(directory / RECORD, current.model_dump_json(indent=2))
        except (FileNotFoundError, DamagedRecordError):
            self.refuse_destroyed(environment.id)
            raise
        except TimeoutError as error:
            raise HostError(
                f"The record of {environment.id} cannot be changed: {error}.",
                hint=f"`lslocks` names the process that holds {directory / RECORD_LOCK}: continue it, or end it.",
            ) from error
        return current

    def all(self) -> list[Environment]:
        """Returns all live environments, oldest first.

        Raises:
            DamagedRecordError: a record cannot be read, so the list would be incomplete.
        """
        readable, unreadable = self._read_all()
        if unreadable:
            raise next(iter(unreadable.values()))
        return readable

    def readable(self) -> list[Environment]:
        """Returns all live environments whose records can be read, oldest first."""
        return self._read_all()[0]

    def unreadable(self) -> dict[str, DamagedRecordError]:
        """Returns the ids of environments whose records cannot be read, each with the error."""
        return self._read_all()[1]

    def _read_all(self) -> tuple[list[Environment], dict[str, DamagedRecordError]]:
        readable, unreadable = [], {}
        for path in sorted(self._home.environments.glob(f"*/{RECORD}")):
            try:
                readable.append(self._read(path))
            except DamagedRecordError as error:
                if path.exists():  # else another provisioner has just destroyed it
                    unreadable[path.parent.name] = error
        return sorted(readable, key=lambda environment: environment.created_at), unreadable

    def reread(self, environment: Environment) -> Environment:
        """Reads the environment's current record. Returns the one given if there is no record on disk.

        Raises:
            DamagedRecordError: the record cannot be read.
        """
        path = self.directory(environment.id) / RECORD
        return self._read(path) if path.exists() else environment

    def last_known(self, environment: Environment) -> Environment:
        """Reads the environment's current record. Returns the one given if none can be read."""
        try:
            return self.reread(environment)
        except SURVIVABLE:
            return environment

    def exists(self, environment_id: str) -> bool:
        """Returns whether an environment has a record and is not archived."""
        return (self.directory(environment_id) / RECORD).exists()

    def refuse_destroyed(self, environment_id: str) -> None:
        """Keeps what has been destroyed from being recorded again, as if it were there.

        Raises:
            UsageError: the environment has been destroyed: it has no record any more.
        """
        if not self.exists(environment_id):
            raise UsageError(
                f"{environment_id} has been destroyed.", hint=f"`provisioner show {environment_id}` shows its record."
            )

    def record(self, environment_id: str) -> Environment | None:
        """Reads the record of the environment with exactly this id, live or archived; None if there is none.

        Raises:
            DamagedRecordError: it cannot be read.
        """
        for root in (self._home.environments, self._home.archive):
            path = root / environment_id / RECORD
            if path.exists():
                return self._read(path)
        return None

    def unrecorded(self) -> list[Path]:
        """Returns environment directories without a record, which a crash between creating the two leaves behind.

        Directories that another running provisioner has locked are left out.
        """
        return [
            path
            for path in self._home.environments.glob("*/")
            if not is_locked(self.lock(path.name)) and not (path / RECORD).exists()
        ]

    def find(self, name: str, *, archived: bool = False) -> Environment:
        """Finds the environment with this id, or the only one whose id starts or ends with it; those that exist first.

        Args:
            name: an id, or an unambiguous beginning or end of one.
            archived: also searches destroyed environments.

        Raises:
            UsageError: no environment matches, or more than one does.
            DamagedRecordError: its record cannot be read.
        """
        roots = [self._home.environments, *([self._home.archive] if archived else [])]
        paths = {path.parent.name: path for root in reversed(roots) for path in root.glob(f"*/{RECORD}")}
        if name in paths:
            return self._read(paths[name])
        matches = sorted(
            environment_id
            for environment_id in paths
            if name and (environment_id.startswith(name) or environment_id.endswith(name))
        )
        living = [each for each in matches if paths[each].parent.parent == self._home.environments]
        for only in (living, matches):
            if len(only) == 1:
                return self._read(paths[only[0]])
        if matches:
            raise UsageError(f"{shown(name)} is ambiguous: it matches {', '.join(matches[:10])}.")
        if not archived and name:
            ids = [path.parent.name for path in self._home.archive.glob(f"*/{RECORD}")]
            destroyed = [each for each in ids if each.startswith(name) or each.endswith(name)]
            if len(destroyed) == 1:
                self.refuse_destroyed(destroyed[0])
        raise UsageError(f"There is no environment {shown(name)}.", hint="`provisioner list` shows all environments.")

    def _read(self, path: Path) -> Environment:
        identity = path.parent.name
        try:
            environment = strict_json.load_file(Environment, path)
            if environment.id != identity:
                raise ValueError(f"it is the record of {environment.id}")
            return environment
        except (OSError, ValueError, MemoryError, RecursionError) as error:
            raise DamagedRecordError(
                f"The record {path} cannot be read: {type(error).__name__}.",
                environment=identity,
                hint="It is damaged, was changed by hand, or is of another version of provisioner. Its machines may "
                f"still run; `provisioner destroy {identity}` removes them.",
                details=str(error)[:DETAILS_CHARACTERS],
            ) from error

    def write_keys(self, environment_id: str, keys: dict[str, KeyPair]) -> None:
        """Writes key pairs as keys/NAME and keys/NAME.pub, with mode 0600."""
        directory = self.directory(environment_id) / "keys"
        directory.mkdir(mode=0o700, exist_ok=True)
        for name, pair in keys.items():
            write_atomically(directory / name, pair.private)
            write_atomically(directory / f"{name}.pub", pair.public + "\n")

    def key(self, environment_id: str, name: str) -> KeyPair:
        """Reads a key pair that write_keys wrote."""
        path = self.key_path(environment_id, name)
        return KeyPair(path.read_text(), path.with_suffix(".pub").read_text().strip())

    def key_path(self, environment_id: str, name: str) -> Path:
        """Returns the file of a private key."""
        return self.directory(environment_id) / "keys" / name

    def login(self, environment: Environment, role: Role, user: str) -> Login:
        """Returns how the controller logs in to a machine.

        Raises:
            UsageError: the environment has no such machine, or it is not up.
        """
        endpoint = environment.endpoints.get(role)
        host_key = self.key_path(environment.id, f"host_{role}.pub")
        if role not in environment.machines:
            raise UsageError(f"{environment.id} has no {role} machine.")
        if endpoint is None or not host_key.exists():
            raise UsageError(
                f"{environment.id} is not up: its status is {environment.status}.",
                hint=f"If no other command works on it, remove it: provisioner destroy {environment.id}",
            )
        return Login(
            endpoint=endpoint,
            user=user,
            private_key=self.key_path(environment.id, "controller"),
            host_key=host_key.read_text().strip(),
            via=self.login(environment, endpoint.jump, "root") if endpoint.jump else None,
            pidfile=self.directory(environment.id) / role / endpoint.pidfile if endpoint.pidfile else None,
        )

    def pin(self, environment: Environment, role: Role, host_key: str) -> None:
        """Stores a machine's host key, `TYPE BASE64`. No other key is accepted from then on."""
        write_atomically(self.key_path(environment.id, f"host_{role}.pub"), host_key + "\n")

    def archive(self, environment: Environment) -> None:
        """Archives record and logs, and removes the rest. To be called once the cloud has confirmed the end.

        A process killed meanwhile may have removed some logs already. What is archived stays when it is done again.
        """
        kept = self._home.archive / environment.id
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(kept / RECORD, environment.model_dump_json(indent=2))
        self._archive_logs(environment.id)
        self.forget(environment.id)

    def archive_damaged(self, environment_id: str) -> None:
        """Archives the logs of an environment whose record cannot be read, and removes the rest.

        To be called once the cloud has confirmed the end. `show` and `logs` cannot find it afterwards.
        """
        with contextlib.suppress(OSError):
            self._archive_logs(environment_id)
        self.forget(environment_id)

    def _archive_logs(self, environment_id: str) -> None:
        live, logs = self.live_logs(environment_id), self.archived_logs(environment_id)
        if live.is_dir():
            # A killed write leaves a hidden temporary file, which no seal covers.
            ignored = shutil.ignore_patterns(".*")
            shutil.copytree(live, logs, ignore=ignored, dirs_exist_ok=True, copy_function=_archive_log)
        for directory in (logs, logs.parent, self._home.archive):
            if directory.is_dir():
                sync(directory)

    def forget(self, environment_id: str) -> None:
        """Removes the environment's directory, lock and lease. The record goes last: a kill leaves it with the rest."""
        directory = self.directory(environment_id)
        for path in directory.glob("*/"):
            if not path.is_symlink():
                remove_tree(path)
        remove_tree(directory)
        self.lock(environment_id).unlink(missing_ok=True)
        self.lease(environment_id).unlink(missing_ok=True)


def _archive_log(source: str, target: str) -> None:
    """Copies a log and syncs the copy, as the original is removed next. Hard-links a recording: large, and finished."""
    linked = False
    if source.endswith(RECORDING_SUFFIXES):
        with contextlib.suppress(OSError):
            Path(target).unlink(missing_ok=True)
            os.link(source, target)
            linked = True
    if not linked:
        shutil.copy2(source, target)
    sync(Path(target))
