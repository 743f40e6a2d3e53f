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
    steady = session.steady()
    with best_effort(steady.progress, f"Keeping {environment.id}"):
        if not session.environments.exists(environment.id):  # another command destroyed it meanwhile
            return False
        # Nothing is written over a record that cannot be read now: it may say more than this process knows.
        environment = session.environments.reread(environment)
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
