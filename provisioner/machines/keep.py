"""Leaves machines to the operator, with the login and the time of their end, where they would be destroyed."""

from __future__ import annotations

from provisioner.best_effort import best_effort
from provisioner.models import Environment
from provisioner.session import Session


def leave_failed(session: Session, environment: Environment) -> bool:
    """Leaves an environment or a builder that failed to the operator, until its time to live ends.

    Returns:
        whether that worked; if not, the caller still has to destroy it.
    """
    if not session.environments.exists(environment.id):  # another command destroyed it meanwhile
        return False
    steady = session.steady()
    with best_effort(steady.progress, f"Keeping {environment.id}"):
        environment = session.environments.last_known(environment)
        environment = session.environments.update(environment, status="ready", attended=False)
        session.leases.release(environment.id)
        steady.progress.note(kept_words(environment))
        return True
    return False


def kept_words(environment: Environment) -> str:
    """Says how to log in to what was left to the operator, and when it ends."""
    login = f"provisioner ssh {environment.id}{' --user root' if environment.kind == 'builder' else ''}"
    return (
        f"Kept {environment.id}: `{login}` logs in, `provisioner destroy {environment.id}` "
        f"removes it; it ends on its own at {environment.expires_at:%H:%M:%S} UTC"
    )
