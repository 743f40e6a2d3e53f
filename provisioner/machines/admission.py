"""Lets this controller reach machines again after its own address has changed."""

from __future__ import annotations

from provisioner.machines.create import create_shared_network
from provisioner.models import Environment
from provisioner.session import Session
from provisioner.store.locks import locked


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
