"""Keeps two provisioners from changing one environment at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from provisioner.models import Environment
from provisioner.session import Session
from provisioner.store.locks import locked


@contextlib.contextmanager
def environment_lock(session: Session, environment: Environment) -> Iterator[Environment]:
    """Keeps other provisioners from changing the environment while this one does.

    Yields:
        the current record, which another provisioner may have changed; the one given if there is none on disk.
    """

    def tell() -> None:
        session.progress.note(f"Waiting for another provisioner that works on {environment.id}")

    with locked(session.environments.lock(environment.id), on_wait=tell):
        yield session.environments.reread(environment)
