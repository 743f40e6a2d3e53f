"""Launches environments: task environments, copies of snapshots, and builders all come up in `launched`.

If one does not come up, all of it is destroyed, or left to the operator who asked for that.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Concatenate, ParamSpec, TypeVar

from provisioner.base.clock import now
from provisioner.base.errors import ProvisionerError
from provisioner.base.models import Breakdown, Environment
from provisioner.base.progress import best_effort, describe
from provisioner.machines.claims import creation_lock, destruction_lock, reserve
from provisioner.machines.create import create_machines, record_environment
from provisioner.machines.destroy import clear_away
from provisioner.session import Session
from provisioner.store.files import Leases

# What a record keeps of the error that ended its environment.
BREAKDOWN_CHARACTERS = 4000

P = ParamSpec("P")
R = TypeVar("R")

Create = Callable[[Session, Environment], Environment]
MayKeep = Callable[[Session, Environment, BaseException], bool]


def create_alone(session: Session, environment: Environment) -> Environment:
    """Creates the machines of one recorded environment, in a stack of its own."""
    [created] = create_machines(session, [environment])
    return created


@contextlib.contextmanager
def launched(
    session: Session,
    environment: Environment,
    may_keep: MayKeep,
    *,
    phase: contextlib.AbstractContextManager[object],
    record: Callable[[Session, Environment], None] = record_environment,
    create: Create = create_alone,
    temporary: bool = False,
) -> Iterator[Environment]:
    """Reserves an environment's cost, records it and creates its machines. The body brings them up.

    If anything fails, everything that was created is destroyed. No other provisioner works on it meanwhile.

    Args:
        environment: nothing of it exists yet, not even a record.
        may_keep: whether to leave the machines to the operator after an error.
        phase: entered while it is recorded and created.
        record: writes the record, and what the machines boot with.
        create: creates the machines of the recorded environment.
        temporary: whether it is destroyed after the body in any case.

    Yields:
        the record, with the machines' endpoints.

    Raises:
        BudgetError: the cost does not fit a budget.
        UnavailableError: a price is not known.
    """
    with creation_lock(session, environment):
        environment = reserve(session, environment)
        try:
            with phase:
                record(session, environment)
                environment = create(session, environment)
            yield environment
        except BaseException as error:
            clear_after_failure(session, environment, error, may_keep)
            raise
        if temporary:
            with session.shield():
                clear_away(session, environment)


def clear_after_failure(session: Session, environment: Environment, error: BaseException, may_keep: MayKeep) -> None:
    """Destroys everything of an environment that did not come up, or leaves its machines to the operator.

    Args:
        environment: its record as far as it is known.
        may_keep: whether to leave the machines to the operator after the error.

    Raises:
        UsageError: another command has destroyed it, which the error only followed from.
    """
    with session.shield():
        by_another = False
        with best_effort(session.steady().progress, f"Looking for the record of {environment.id}"):
            # What was about to be written to has gone.
            by_another = isinstance(error, FileNotFoundError) and not session.environments.exists(environment.id)
        environment = session.environments.last_known(environment)
        is_left = False
        if may_keep(session, environment, error):
            record_breakdown(session, environment, error)
            is_left = leave_failed(session, environment)
        if not is_left:
            tell_of_destruction(session, environment, error)
            clear_away(session, environment)
    if by_another:
        session.environments.refuse_destroyed(environment.id)


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


def tell_of_destruction(session: Session, environment: Environment, error: BaseException) -> None:
    """Says and records why an environment is destroyed: if the destruction fails, too, the operator sees only that."""
    session.steady().progress.note(f"Destroying {environment.id}: {describe(error)}")
    record_breakdown(session, environment, error)


def record_breakdown(session: Session, environment: Environment, error: BaseException) -> None:
    """Keeps why an environment ends early in its record, as far as possible, unless it has been destroyed."""
    with best_effort(session.steady().progress, f"Recording why {environment.id} ends"):
        if not session.environments.exists(environment.id):
            return
        phase = error.phase if isinstance(error, ProvisionerError) else ""
        message = session.redactor.redact(describe(error))[:BREAKDOWN_CHARACTERS]
        breakdown = Breakdown(phase=phase, message=message, at=now())
        # Nothing is written over a record that cannot be read now: it may say more than this process knows.
        session.environments.update(session.environments.reread(environment), breakdown=breakdown)


def looked_after(work: Callable[Concatenate[Session, P], R]) -> Callable[Concatenate[Session, P], R]:
    """Wraps a function that brings environments up: if Ctrl-C ends it, those that it still leases are destroyed.

    Ctrl-C may come between any two instructions: before a `try` has begun, or as a clean-up begins. The function gets
    leases of its own, which are taken before anything exists; the environments whose leases are left are destroyed.
    """

    @functools.wraps(work)
    def wrapper(session: Session, /, *args: P.args, **named: P.kwargs) -> R:
        session = replace(session, leases=Leases())
        try:
            return work(session, *args, **named)
        except KeyboardInterrupt as error:
            with session.shield():
                for identity in session.leases.held():
                    with best_effort(session.steady().progress, f"Destroying {identity}"):
                        _end_abandoned(session, identity, error)
            raise

    return wrapper


def _end_abandoned(session: Session, identity: str, error: BaseException) -> None:
    environment = session.environments.record(identity)
    if environment and session.environments.exists(identity):
        with destruction_lock(session, environment) as environment:
            tell_of_destruction(session, environment, error)
            clear_away(session, environment)
    else:  # nothing but its reservation can exist
        session.leases.release(identity)
        session.ledger.settle(identity, now(), 0)
        session.environments.forget(identity)
