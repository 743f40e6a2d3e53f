"""Selects the environments that a destroy is about, and destroys those whose records cannot be read."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from provisioner.base.clock import now
from provisioner.base.errors import DamagedRecordError, UsageError
from provisioner.base.models import Environment
from provisioner.base.progress import best_effort
from provisioner.clouds.cloud import EnvironmentResources
from provisioner.costs.ledger import Entry
from provisioner.session import Session
from provisioner.store.files import is_locked


@dataclass
class Selection:
    """The environments that were selected.

    Args:
        live: the records of those that exist.
        gone: the names of those that are already destroyed.
        damaged: the ids of those that exist and whose records cannot be read.
    """

    live: list[Environment] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def select_for_destroy(session: Session, names: Sequence[str], *, everything: bool) -> Selection:
    """Selects environments by name, or all of them.

    Args:
        names: ids, or beginnings or ends of them.
        everything: selects all environments and ignores the names. Directories without a record, in which a crash left
            nothing to destroy, are removed at once.

    Raises:
        UsageError: a name matches no environment, live or destroyed; or it is a part of the id of one that a running
            batch has.
    """
    store = session.environments
    if everything:
        for directory in store.unrecorded():
            with best_effort(session.progress, f"Removing {directory}"):
                store.forget(directory.name)
        return Selection(live=store.readable(), damaged=sorted(store.unreadable()))
    selection = Selection()
    for name in names:
        try:
            environment = store.find(name, archived=True)
        except DamagedRecordError as error:
            if error.environment not in selection.damaged:
                selection.damaged.append(error.environment)
            continue
        if not store.directory(environment.id).exists():
            selection.gone.append(environment.id)
            continue
        refuse_part_of_id(session, name, environment)
        if environment not in selection.live:
            selection.live.append(environment)
    return selection


def refuse_part_of_id(session: Session, name: str, environment: Environment) -> None:
    """Refuses a part of an id that matches an environment of a running batch or eval.

    An operator may mean another environment, which is gone by now, and would disturb a run that counts.

    Args:
        name: what the operator gave.

    Raises:
        UsageError: it is such a part.
    """
    if environment.batch and name != environment.id and is_locked(session.environments.lease(environment.id)):
        raise UsageError(
            f"{environment.id} belongs to the running batch {environment.batch}, and {name!r} is not its whole id.",
            hint="Give the whole id if you mean it: that may change the run's result.",
        )


def launches(session: Session, identity: str) -> list[Entry]:
    """Returns what the ledger knows of an environment; nothing if the ledger cannot be read."""
    with contextlib.suppress(Exception):
        return session.ledger.entries(environment=identity)
    return []


def destroy_damaged(session: Session, identity: str) -> None:
    """Destroys an environment whose record cannot be read, by what its cloud and the ledger know of it.

    Args:
        session: on the environment's cloud.

    Raises:
        StillThereError: some of its resources could not be removed.
        InfrastructureError: the cloud could not be asked, or the reservation could not be settled.
    """
    session = session.steady()
    entries = launches(session, identity)
    found = [resources for resources in session.cloud.list_resources(None) if resources.environment == identity]
    places = {resources.region for resources in found} | {entry.region for entry in entries} or {""}
    for region in sorted(places):
        session.cloud.delete_resources(EnvironmentResources(environment=identity, region=region))
    try:
        session.ledger.settle_late(identity, now())
    finally:
        session.leases.release(identity)
    if session.environments.directory(identity).exists():
        session.environments.archive_damaged(identity)
    if not entries:
        session.progress.note(
            f"The ledger knows no launch of {identity}. If it ran elsewhere than in {session.cloud.name}, "
            "`provisioner sweep --cloud CLOUD` finds its machines."
        )
