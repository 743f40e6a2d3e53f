"""Opens SSH connections to machines that are up."""

from __future__ import annotations

from provisioner.errors import MachineLostError
from provisioner.machines.admission import readmit, require_alive
from provisioner.models import Environment, Role
from provisioner.session import Session
from provisioner.ssh.connection import Connection


def connect(session: Session, environment: Environment, role: Role) -> Connection:
    """Opens root's SSH connection to a machine that is up.

    Raises:
        HostError, InfrastructureError: this controller's address has changed, and cannot be let in.
        MachineLostError: the machine does not answer, or has ended.
    """
    readmit(session, environment)
    login = session.environments.login(environment, role, "root")
    try:
        calls = session.calls(environment, role)
        return Connection(login, 60, lambda: session.cloud.alive(environment, role), session.check, calls)
    except MachineLostError:
        require_alive(session, environment, role)
        raise
