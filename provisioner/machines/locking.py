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
        the record as it is now: another provisioner may have changed it until then. The one given, if none is kept.
    """

    def tell() -> None:
        session.progress.note(f"Another provisioner works on {environment.id}; waiting for it")

    with locked(session.environments.lock(environment.id), on_wait=tell):
        yield session.environments.reread(environment)
