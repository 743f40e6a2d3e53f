"""Keeps the logs and captures of an environment's machines, and seals them once all of it is gone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from provisioner.base.models import Environment, Role
from provisioner.base.progress import best_effort, best_effort_within
from provisioner.clouds.cloud import Capture
from provisioner.machines.connect import on_all_machines
from provisioner.machines.create import stack_of
from provisioner.recording import isolation, manifest, packets
from provisioner.recording.manifest import unsealed
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from provisioner.store.files import write_atomically
from provisioner.version import __version__

# Reading a full capture takes about a second of one processor.
CAPTURES_SECONDS = 60.0
MESSAGE_CHARACTERS = 2000


def keep_captures(session: Session, environment: Environment) -> None:
    """Saves what the machines' cards carried in the environment's logs, as far as possible."""
    with best_effort(session.progress, f"Keeping the captures of {environment.id}"):
        captures = session.cloud.captures(environment) if environment.recorded else []
        if captures:
            what = f"Keeping the captures of {environment.id}"
            best_effort_within(session.progress, what, CAPTURES_SECONDS, lambda: _keep(session, environment, captures))


def _keep(session: Session, environment: Environment, captures: list[Capture]) -> None:
    directory = session.environments.live_logs(environment.id)
    for capture in captures:
        with best_effort(session.progress, f"Keeping {capture.path.name} of the {capture.role} machine"):
            write_log(directory / f"{capture.role}-{capture.card}.pcap", read_capture(capture.path))


def read_capture(path: Path) -> bytes:
    """Returns the whole packets of a capture, with their times set right.

    Raises:
        OSError: it cannot be read, or is a link: an attacker in QEMU must not choose what is read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        capture = packets.whole(file.read(packets.LIMIT_BYTES))
        return packets.set_right(capture, os.fstat(descriptor).st_mtime)


def sealed(session: Session, environment: Environment) -> Environment:
    """Seals the logs of an environment that is gone, as far as possible, and returns the record with their hash."""
    if environment.kind == "task":
        with best_effort(session.progress, f"Sealing the logs of {environment.id}"):
            logs = session.environments.live_logs(environment.id)
            head = manifest.seal(logs, facts_of(environment, isolation.find(logs)), write_atomically)
            return environment.model_copy(update={"recording": head})
    return environment


def is_archived(session: Session, environment: Environment) -> bool:
    """Returns whether the sealed logs of an environment, and its record, are all in the archive already.

    A process killed while it removed the rest has left a part of the logs. Sealed again, they would get another hash.
    """
    logs = session.environments.archived_logs(environment.id)
    with contextlib.suppress(OSError, ValueError):
        sealed_before = manifest.load(logs)
        return sealed_before.facts.get("environment") == environment.id and not manifest.problems(logs, sealed_before)
    return False


def facts_of(environment: Environment, proof: isolation.Proof | None = None) -> dict[str, Any]:
    """Returns what the logs of an environment are about. Pure.

    Args:
        proof: the last one of its isolation.
    """
    outcome = environment.outcome
    return {
        "environment": environment.id,
        "family": environment.family,
        "family_version": environment.family_version,
        "task": environment.task,
        "cloud": environment.cloud,
        "created_at": environment.created_at.isoformat(),
        "images": {role: machine.image for role, machine in environment.machines.items()},
        "snapshot": environment.snapshot,
        "recorded": environment.recorded,
        "agent_files": environment.agent_files,
        "agent_exit_code": environment.agent_exit_code,
        "status": outcome.status if outcome else None,
        "score": outcome.score if outcome else None,
        "message": outcome.message[:MESSAGE_CHARACTERS] if outcome else "",
        "scored_at": outcome.scored_at.isoformat() if outcome else None,
        "isolation": proof.facts() if proof else None,
        "gone_at": environment.gone_at.isoformat() if environment.gone_at else None,
        "versions": {"provisioner": __version__, **environment.versions},
        "record": record_hash(environment),
    }


def record_hash(environment: Environment) -> str:
    """Returns a hash of all that a record says, but for the hash of the sealed logs, in which this one goes."""
    # Without defaults: what later versions add to records has some.
    said = environment.model_dump(mode="json", exclude_defaults=True, exclude={"recording"})
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


# Bounds for a hostile machine, which may send nothing for ever, or too much.
JOURNAL_LINES = 5000
JOURNAL_SECONDS = 20.0
JOURNAL_BYTES = 2 << 20
# For all machines at once, connecting included.
JOURNALS_SECONDS = 60.0


def keep_journals(session: Session, environment: Environment) -> None:
    """Saves the end of each machine's journal in the environment's logs, as far as possible, within a minute."""

    def fetch(role: Role, _: threading.Event) -> None:
        argv = ["journalctl", "--boot", "--no-pager", "--lines", str(JOURNAL_LINES)]
        with best_effort(session.progress, f"Keeping the journal of the {role} machine"):
            if not session.cloud.alive(environment, role):
                return
            login = session.environments.login(environment, role, "root")
            with Connection(login, JOURNAL_SECONDS, calls=session.calls(environment, role)) as connection:
                journal = connection.run(argv, timeout_seconds=JOURNAL_SECONDS, limit_bytes=JOURNAL_BYTES).stdout
            text = session.redactor.redact(journal.decode(errors="replace"))
            write_log(session.environments.live_logs(environment.id) / f"journal-{role}.log", text)

    what = f"Keeping the journals of {environment.id}"
    best_effort_within(session.progress, what, JOURNALS_SECONDS, lambda: on_all_machines(environment.machines, fetch))


def keep_logs(session: Session, environment: Environment, directory: Path) -> None:
    """Saves the machines' consoles and Terraform's log, as they are now, each as far as possible.

    Args:
        directory: where to; if it is not there, nothing is saved.
    """
    if not directory.is_dir():
        return

    def keep(name: str, read: Callable[[], str]) -> None:
        with best_effort(session.progress, f"Keeping {name} of {environment.id}"):
            if text := read():
                write_log(directory / name, session.redactor.redact(text))

    for role in environment.machines:
        keep(f"console-{role}.log", partial(session.cloud.console, environment, role))
    keep("terraform.log", stack_of(session, environment).log_text)


def write_log(path: Path, data: str | bytes) -> None:
    """Writes a log, unless its directory has been sealed: what takes too long may go on while an environment ends."""
    with unsealed(path.parent) as is_open:
        if is_open:
            write_atomically(path, data)
