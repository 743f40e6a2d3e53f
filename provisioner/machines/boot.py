"""Waits until an environment's machines have booted and accept the controller's login."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from provisioner.errors import MachineLostError
from provisioner.machines.parallel import on_all_machines
from provisioner.models import Environment, Role
from provisioner.session import Session
from provisioner.ssh.connection import Connection

# Two emulated machines on one busy core need about a minute, a first boot with GPU drivers on EC2 more than five. No
# healthy machine needs this long.
BOOT_SECONDS = 600
POLL_SECONDS = 1.0


def boot_machines(session: Session, environment: Environment) -> dict[Role, Connection]:
    """Waits for all machines at once until they accept a login as root.

    Raises:
        MachineLostError: a machine did not come up; the details hold the end of its console.
    """

    pinned = {role: threading.Event() for role in environment.machines}

    def reach(role: Role, cancelled: threading.Event) -> Connection:
        deadline = time.monotonic() + BOOT_SECONDS

        def alive() -> bool:
            return not cancelled.is_set() and session.cloud.alive(environment, role)

        try:
            session.environments.pin(environment, role, _host_key(session, environment, role, deadline, alive))
            pinned[role].set()
            if (jump := environment.endpoints[role].jump) and not pinned[jump].wait(BOOT_SECONDS):
                raise MachineLostError("The machine that it is reached through did not come up.")
            login = session.environments.login(environment, role, "root")
            calls = session.calls(environment, role)
            return Connection(login, deadline - time.monotonic(), alive, session.check, calls, boots=True)
        except MachineLostError as error:
            console = "\n".join(session.cloud.console(environment, role).splitlines()[-15:])
            hint = session.cloud.unreachable_hint(environment) if pinned[role].is_set() and alive() else None
            message = f"The {role} machine did not come up: {error.message}"
            raise MachineLostError(message, hint=hint, details=console) from error

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
    """Waits until the cloud reports the machine's host key, the only key that the controller will accept."""
    while (key := session.cloud.host_key(environment, role)) is None:
        session.check()
        if time.monotonic() > deadline or not alive():
            raise MachineLostError("The cloud did not report its host key.")
        time.sleep(POLL_SECONDS)
    return key
