"""Asks whether machines run, and lets this controller reach them again after its own address has changed."""

from __future__ import annotations

from provisioner.clock import now
from provisioner.errors import MachineLostError
from provisioner.machines.create import create_shared_network
from provisioner.models import Environment, Role
from provisioner.session import Session
from provisioner.store.locks import locked


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


def readmit(session: Session, environment: Environment) -> None:
    """Opens the ways to an environment's machines for this controller's address, if it has another than at the start.

    Raises:
        HostError, InfrastructureError: the cloud does not do it, or another controller would have to.
    """
    if not session.cloud.is_locked_out(environment):
        return
    session.progress.note(f"{environment.id}: this controller's address has changed; letting the new one in")
    with locked(session.home.locks / f"admission-{environment.id}"):
        if not environment.full_internet:  # the routes there lead to controllers alone
            create_shared_network(session, environment)
        session.cloud.admit(environment)
