"""Opens SSH connections to machines that are up, and keeps some open for later commands."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from provisioner.base.clock import now, overdue
from provisioner.base.errors import MachineLostError
from provisioner.base.models import Environment, Role
from provisioner.machines.create import create_shared_network
from provisioner.session import Session
from provisioner.ssh.calls import SOCKET, Calls
from provisioner.ssh.connection import Connection
from provisioner.ssh.openssh import START_SECONDS, KeptConnection, end_connection, keep_connection
from provisioner.store.files import locked

T = TypeVar("T")


def on_all_machines(roles: Mapping[Role, object], work: Callable[[Role, threading.Event], T]) -> dict[Role, T]:
    """Runs `work` for all machines at once. Raises the first failure, and sets the event so that the others stop."""
    cancelled = threading.Event()
    pool = ThreadPoolExecutor(max_workers=len(roles))
    try:
        futures = {role: pool.submit(work, role, cancelled) for role in roles}
        wait(futures.values(), return_when="FIRST_EXCEPTION")
        for future in futures.values():
            if future.done():
                future.result()
        return {role: future.result() for role, future in futures.items()}
    except BaseException:
        cancelled.set()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def connect(session: Session, environment: Environment, role: Role) -> Connection:
    """Opens root's SSH connection to a machine that is up.

    Raises:
        HostError, InfrastructureError: this controller's address has changed, and cannot be let in.
        MachineLostError: the machine does not answer, or has ended.
    """
    authorize(session, environment)
    login = session.environments.login(environment, role, "root")
    try:
        calls = session.calls(environment, role)
        return Connection(login, 60, lambda: session.cloud.alive(environment, role), session.check, calls)
    except MachineLostError:
        require_alive(session, environment, role)
        raise


def require_alive(session: Session, environment: Environment, role: Role) -> None:
    """Asks the cloud whether a machine runs, which says at once what its silence would say after minutes.

    Raises:
        MachineLostError: it has ended.
    """
    if session.cloud.alive(environment, role):
        return
    why = " Its time to live has ended." if environment.expires_at <= now() else ""
    raise MachineLostError(
        f"The {environment.hostname(role)} machine of {environment.id} is no longer running.{why}",
        hint=f"provisioner destroy {environment.id} removes the environment.",
    )


def authorize(session: Session, environment: Environment) -> None:
    """Opens the ways to an environment's machines for this controller's address, if it has another than at the start.

    Raises:
        HostError, InfrastructureError: the cloud does not do it, or another controller would have to.
    """

    def open_network() -> None:
        session.progress.note(f"{environment.id}: this controller's address has changed; letting the new one in")
        if not environment.full_internet:  # the routes there lead to controllers alone
            create_shared_network(session, environment)

    session.cloud.authorize(environment, open_network)


# After how long an operator reads why nothing happens.
SILENCE_SECONDS = 5.0


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
    kept = KeptConnection(path, where, session.check, session.calls(environment, role), login.pidfile)

    def note_silence() -> None:
        what = f"the {environment.hostname(role)} machine does not answer yet"
        session.progress.note(f"{environment.id}: {what}; waiting up to 90 s")

    with contextlib.suppress(OSError), overdue(SILENCE_SECONDS, note_silence):
        if not kept.listens():
            require_alive(session, environment, role)
            authorize(session, environment)
            with locked(path.with_suffix(".lock"), wait_seconds=START_SECONDS, make_parents=False):
                if not kept.listens():
                    known_hosts = path.parent / "keys" / f"known_hosts_{role}"
                    keep_connection(login, known_hosts, path, SOCKET, session.check)
        with KeptConnection(path, where, session.check, pidfile=login.pidfile) as unrecorded:
            if unrecorded.answers():
                return kept

    return connect(session, environment, role)


def end_kept(session: Session, environment: Environment) -> None:
    """Ends the connections that are kept to an environment's machines.

    Raises:
        OSError: one of them cannot be ended now.
    """
    directory: Path = session.environments.directory(environment.id)
    for role in environment.machines:
        end_connection(directory / f"connection-{role}")
