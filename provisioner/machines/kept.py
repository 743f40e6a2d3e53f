"""Reaches machines that are up over connections which stay for later commands, and ends those connections.

Nothing depends on them. A command that cannot use one opens a connection of its own. An unused connection ends after a
minute, unless the machine holds a call open.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from provisioner.errors import MachineLostError
from provisioner.models import Environment, Role
from provisioner.progress import Progress
from provisioner.session import Session
from provisioner.ssh.calls import SOCKET, Calls
from provisioner.ssh.kept_connection import START_SECONDS, KeptConnection, end_connection, keep_connection
from provisioner.store.locks import locked

# After how long an operator reads why nothing happens.
SILENCE_SECONDS = 5.0


@contextlib.contextmanager
def noted_after(seconds: float, progress: Progress, text: str) -> Iterator[None]:
    """Tells the operator a text if the body takes longer."""
    timer = threading.Timer(seconds, progress.note, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def connect_kept(session: Session, environment: Environment, role: Role) -> Calls:
    """Returns what makes calls in a machine: over a connection that stays, or one of its own if that does not work.

    Raises:
        HostError, InfrastructureError, MachineLostError: as for connect.
        UsageError: the machine is not up.
    """
    if why := session.cloud.standstill(environment, role):
        raise MachineLostError(f"The {environment.hostname(role)} machine of {environment.id} cannot answer: {why}.")
    login = session.environments.login(environment, role, "root")
    path = session.environments.directory(environment.id) / f"connection-{role}"
    where = f"{login.endpoint.host}:{login.endpoint.port}"
    kept = KeptConnection(path, where, session.check, session.calls(environment, role))
    silence = f"{environment.id}: the {environment.hostname(role)} machine does not answer yet; waiting up to 90 s"
    with contextlib.suppress(OSError), noted_after(SILENCE_SECONDS, session.progress, silence):
        if not kept.listens():
            from provisioner.machines.admission import readmit, require_alive  # as connect below: they import much

            require_alive(session, environment, role)
            readmit(session, environment)
            with locked(path.with_suffix(".lock"), wait_seconds=START_SECONDS, make_parents=False):
                if not kept.listens():
                    known_hosts = path.parent / "keys" / f"known_hosts_{role}"
                    keep_connection(login, known_hosts, path, SOCKET, session.check)
        with KeptConnection(path, where, session.check) as unrecorded:
            if unrecorded.answers():
                return kept
    from provisioner.machines.connect import connect

    return connect(session, environment, role)


def end_kept(session: Session, environment: Environment) -> None:
    """Ends the connections that are kept to an environment's machines.

    Raises:
        OSError: one of them cannot be ended now.
    """
    directory: Path = session.environments.directory(environment.id)
    for role in environment.machines:
        end_connection(directory / f"connection-{role}")
