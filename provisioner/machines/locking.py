"""Keeps two provisioners from changing one environment at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from provisioner.best_effort import best_effort
from provisioner.models import Environment
from provisioner.session import Session
from provisioner.store.locks import locked


@contextlib.contextmanager
def environment_lock(session: Session, environment: Environment) -> Iterator[Environment]:
    """Keeps other provisioners from changing the environment while this one does.

    Yields:
        the current record, which another provisioner may have changed; the one given if there is none on disk.
    """
    with _locked(session, environment):
        yield session.environments.reread(environment)


@contextlib.contextmanager
def destruction_lock(session: Session, environment: Environment) -> Iterator[Environment]:
    """Does the same for a destruction, which a lock file that cannot be written or a damaged record must not prevent.

    Yields:
        the current record; the one given if none can be read.
    """
    with contextlib.ExitStack() as stack:
        with best_effort(session.progress, f"Locking {environment.id}"):
            stack.enter_context(_locked(session, environment))
        yield session.environments.last_known(environment)


def _locked(session: Session, environment: Environment) -> contextlib.AbstractContextManager[None]:
    def tell() -> None:
        session.progress.note(f"Waiting for another provisioner that works on {environment.id}")

    return locked(session.environments.lock(environment.id), on_wait=tell)
