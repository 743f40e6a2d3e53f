"""Reserves an environment's cost before anything of it exists, and clears all of it away if it does not come up.

Everything that comes up does so in here: task environments, copies of snapshots, and builders.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from provisioner.best_effort import best_effort, describe
from provisioner.clock import now
from provisioner.errors import ProvisionerError
from provisioner.machines import reservations
from provisioner.machines.create import create_machines
from provisioner.machines.destroy import clear_away
from provisioner.machines.keep import leave_failed
from provisioner.machines.locking import creation_lock
from provisioner.models import Breakdown, Environment
from provisioner.session import Session

# What a record keeps of the error that ended its environment.
BREAKDOWN_CHARACTERS = 4000

Create = Callable[[Session, Environment], Environment]
MayKeep = Callable[[BaseException], bool]


def create_alone(session: Session, environment: Environment) -> Environment:
    """Creates the machines of one recorded environment, in a stack of its own."""
    [created] = create_machines(session, [environment])
    return created


@contextlib.contextmanager
def launched(session: Session, environment: Environment, may_keep: MayKeep) -> Iterator[Environment]:
    """Reserves the cost of an environment. The body then records it, creates its machines and brings them up.

    If the body fails, everything that was created is destroyed. No other provisioner works on it meanwhile.

    Args:
        environment: nothing of it exists yet, not even a record.
        may_keep: whether to leave the machines to the operator after an error.

    Yields:
        the environment with its highest price per hour.

    Raises:
        BudgetError: the cost does not fit a budget.
        UnavailableError: a price is not known.
    """
    with creation_lock(session, environment):
        environment = reservations.reserve(session, environment)
        with cleared_on_failure(session, environment, may_keep):
            yield environment


@contextlib.contextmanager
def cleared_on_failure(session: Session, environment: Environment, may_keep: MayKeep) -> Iterator[None]:
    """Destroys everything of an environment that is being brought up if the body fails.

    Args:
        may_keep: whether to leave the machines to the operator after an error.
    """
    try:
        yield
    except BaseException as error:
        with session.shield():
            record_breakdown(session, environment, error)
            if not (may_keep(error) and leave_failed(session, environment)):
                tell_of_destruction(session, environment, error)
                clear_away(session, environment)
        if isinstance(error, FileNotFoundError):  # what it was about to write to may have been removed by another
            session.environments.refuse_destroyed(environment.id)
        raise


def tell_of_destruction(session: Session, environment: Environment, error: BaseException) -> None:
    """Says why an environment is destroyed: the error is lost to the operator if the destruction fails, too."""
    session.steady().progress.note(f"Destroying {environment.id}: {describe(error)}")


def record_breakdown(session: Session, environment: Environment, error: BaseException) -> None:
    """Keeps why an environment ends early in its record, as far as possible, unless it has been destroyed."""
    with best_effort(session.steady().progress, f"Recording why {environment.id} ends"):
        if not session.environments.exists(environment.id):
            return
        phase = error.phase if isinstance(error, ProvisionerError) else ""
        message = session.redactor.redact(describe(error))[:BREAKDOWN_CHARACTERS]
        breakdown = Breakdown(phase=phase, message=message, at=now())
        session.environments.update(session.environments.last_known(environment), breakdown=breakdown)
