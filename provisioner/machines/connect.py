"""Opens SSH connections to machines that are up."""

from __future__ import annotations

from provisioner.clock import now
from provisioner.errors import MachineLostError
from provisioner.models import Environment, Role
from provisioner.remote.ssh import Connection
from provisioner.session import Session


def connect(session: Session, environment: Environment, role: Role, user: str = "root") -> Connection:
    """Opens an SSH connection to a machine that is up.

    Raises:
        MachineLostError: no SSH, or the machine has ended.
    """
    login = session.environments.login(environment, role, user)
    try:
        return Connection(login, 60, lambda: session.cloud.alive(environment, role), session.check)
    except MachineLostError as error:
        if not session.cloud.alive(environment, role):
            why = " Its time limit has passed." if environment.expires_at <= now() else ""
            raise MachineLostError(
                f"The {role} machine of {environment.id} is not running any more.{why}",
                hint=f"provisioner destroy {environment.id} clears it away.",
            ) from error
        raise
