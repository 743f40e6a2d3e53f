"""Waits until an environment's machines have booted and let the controller in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from provisioner.errors import MachineLostError
from provisioner.machines.parallel import on_all_machines
from provisioner.models import Environment, Role
from provisioner.remote.ssh import Connection
from provisioner.session import Session

# Emulated, two machines on one busy core need about a minute; nothing healthy needs this long.
BOOT_SECONDS = 300
POLL_SECONDS = 1.0


def boot_machines(session: Session, environment: Environment) -> dict[Role, Connection]:
    """Waits, for all machines at once, until they let the controller in as root.

    Raises:
        MachineLostError: with the end of the machine's console.
    """

    told = {role: threading.Event() for role in environment.machines}

    def reach(role: Role, cancelled: threading.Event) -> Connection:
        deadline = time.monotonic() + BOOT_SECONDS

        def alive() -> bool:
            return not cancelled.is_set() and session.cloud.alive(environment, role)

        try:
            session.environments.pin(environment, role, _host_key(session, environment, role, deadline, alive))
            told[role].set()
            if (jump := environment.endpoints[role].jump) and not told[jump].wait(BOOT_SECONDS):
                raise MachineLostError("The machine that leads to it did not come up.")
            login = session.environments.login(environment, role, "root")
            return Connection(login, deadline - time.monotonic(), alive, session.check)
        except MachineLostError as error:
            console = "\n".join(session.cloud.console(environment, role).splitlines()[-15:])
            raise MachineLostError(f"The {role} machine did not come up: {error.message}", details=console) from error

    connections = on_all_machines(environment.machines, reach)
    try:
        session.cloud.harden(environment, connections)
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise
    return connections


def _host_key(
    session: Session, environment: Environment, role: Role, deadline: float, alive: Callable[[], bool]
) -> str:
    """The machine's host key, from the cloud alone: what answers at its address must show the same."""
    while (key := session.cloud.host_key(environment, role)) is None:
        session.check()
        if time.monotonic() > deadline or not alive():
            raise MachineLostError("The cloud does not tell its host key.")
        time.sleep(POLL_SECONDS)
    return key
