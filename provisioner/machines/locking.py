"""Keeps two provisioners from changing one environment at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from provisioner.best_effort import best_effort
from provisioner.models import Environment
from provisioner.session import Session
from provisioner.store.environments import refuse_ending
from provisioner.store.locks import locked

DESTRUCTION_WAIT_SECONDS = 60.0


@contextlib.contextmanager
def creation_lock(session: Session, environment: Environment) -> Iterator[None]:
    """Keeps other provisioners from changing an environment that has no record yet."""
    with _locked(session, environment):
        yield


@contextlib.contextmanager
def environment_lock(session: Session, environment: Environment) -> Iterator[Environment]:
    """Keeps other provisioners from changing the environment while this one does.

    A destruction takes `destruction_lock` instead.

    Yields:
        the current record, which another provisioner may have changed: to be changed instead of the one given.

    Raises:
        UsageError: the environment has been destroyed, or its destruction has begun.
        DamagedRecordError: the record cannot be read.
    """
    with _locked(session, environment):
        session.environments.refuse_destroyed(environment.id)
        current = session.environments.reread(environment)
        refuse_ending(current)
        yield current


@contextlib.contextmanager
def destruction_lock(session: Session, environment: Environment) -> Iterator[Environment]:
    """Does the same for a destruction, which may have begun before.

    No missing or damaged record and no unwritable lock file prevents it.

    A command that works on the environment has a minute to end: it may be waiting for a silent machine for hours.

    Yields:
        the current record; the one given if none can be read.
    """
    with contextlib.ExitStack() as stack:
        with best_effort(session.progress, f"Locking {environment.id}"):
            stack.enter_context(_locked(session, environment, DESTRUCTION_WAIT_SECONDS))
        yield session.environments.last_known(environment)


def _locked(
    session: Session, environment: Environment, wait_seconds: float | None = None
) -> contextlib.AbstractContextManager[None]:
    def tell() -> None:
        session.progress.note(f"Waiting for another provisioner that works on {environment.id}")

    return locked(session.environments.lock(environment.id), on_wait=tell, wait_seconds=wait_seconds)
