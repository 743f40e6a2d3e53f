"""Saves logs that would be lost with the machines: journals, consoles and Terraform's log."""

from __future__ import annotations

import contextlib
import threading

from provisioner.errors import ProvisionerError
from provisioner.machines.parallel import on_all_machines
from provisioner.machines.stacks import stack_of
from provisioner.models import Environment, Role
from provisioner.remote.ssh import Connection
from provisioner.session import Session
from provisioner.store.files import write_atomically

# Bounds for a hostile machine, which may send nothing for ever, or too much.
JOURNAL_LINES = 5000
JOURNAL_SECONDS = 20.0
JOURNAL_BYTES = 2 << 20


def keep_journals(session: Session, environment: Environment) -> None:
    """Saves the end of each machine's journal in the environment's logs. Skips machines that do not answer."""

    def fetch(role: Role, _: threading.Event) -> None:
        argv = ["journalctl", "--boot", "--no-pager", "--lines", str(JOURNAL_LINES)]
        # OSError too: a log that cannot be written must not keep the machine alive.
        with contextlib.suppress(ProvisionerError, OSError):
            if not session.cloud.alive(environment, role):
                return
            login = session.environments.login(environment, role, "root")
            with Connection(login, JOURNAL_SECONDS) as connection:
                journal = connection.run(argv, timeout_seconds=JOURNAL_SECONDS, limit_bytes=JOURNAL_BYTES).stdout
            text = session.redactor.redact(journal.decode(errors="replace"))
            write_atomically(session.environments.logs(environment.id) / f"journal-{role}.log", text)

    on_all_machines(environment.machines, fetch)


def keep_logs(session: Session, environment: Environment) -> None:
    """Saves the machines' consoles and Terraform's log in the environment's logs, as far as possible."""
    if not session.environments.directory(environment.id).is_dir():
        return
    directory = session.environments.logs(environment.id)
    with contextlib.suppress(OSError):  # a full disk must not keep machines alive
        texts = {f"console-{role}.log": session.cloud.console(environment, role) for role in environment.machines}
        for name, text in (texts | {"terraform.log": stack_of(session, environment).log_text()}).items():
            if text:
                write_atomically(directory / name, session.redactor.redact(text))
