"""Saves logs that would be lost with the machines: journals, consoles and Terraform's log."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from provisioner.best_effort import best_effort, best_effort_within
from provisioner.machines.parallel import on_all_machines
from provisioner.machines.stacks import stack_of
from provisioner.models import Environment, Role
from provisioner.recording.manifest import unsealed
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from provisioner.store.files import write_atomically

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
