"""Destroys machines until the cloud says that they are gone."""

from __future__ import annotations

import time

from provisioner.errors import HostError, InfrastructureError, ProvisionerError, StillThereError
from provisioner.machines import reservations
from provisioner.machines.stacks import stack_of
from provisioner.models import Environment, Status
from provisioner.session import Session

# EC2 API reference, "Eventual consistency": seconds, as a rule.
SECOND_LOOK_SECONDS = 5.0


def destroy_machines(session: Session, *environments: Environment) -> None:
    """Destroys machines, asks the cloud whether they are gone, removes what is not, and archives the records.

    Safe to repeat, and after a crash at any moment. Terraform's word is not taken for it: killed at the wrong
    moment it forgets a machine and then destroys nothing with exit code 0.

    Args:
        environments: of one stack; they take one run of Terraform. One that leaves others behind takes none: it stops
            costing at once, and the controller spends no provider's start on it.

    Raises:
        StillThereError: something would not go, or the cloud could not be asked; its record and its hold stay.
    """
    ran = {one.id: reservations.still_runs(session, one) for one in environments}
    environments = tuple(_marked(session, one, "destroying") for one in environments)
    stack = stack_of(session, environments[0])
    trouble: ProvisionerError | None = None
    by_hand = len(environments) == 1 and environments[0].stack != environments[0].id and not stack.is_remote
    try:
        if by_hand:
            stack.rest(session.progress.note)
            session.cloud.remove(environments[0])
        else:
            stack.remove({one.id for one in environments}, session.progress.note)
    except (InfrastructureError, HostError) as error:
        trouble = error
    still_there = {one.id: left for one in environments if (left := _verify(session, one))}
    gone = [one for one in environments if one.id not in still_there]
    if (trouble or by_hand) and gone:
        # The cloud says that all is gone: what remains of the stack describes nothing.
        stack.forget({one.id for one in gone})
    for one in gone:
        reservations.settle(session, one, ran=ran[one.id])
        session.environments.archive(one)
        session.leases.release(one.id)
    if still_there:
        raise StillThereError(
            "; ".join(f"{name} is not gone: {', '.join(left)}" for name, left in still_there.items()),
            hint=f"provisioner destroy {' '.join(still_there)} tries again.",
            details=trouble.details if trouble else None,
        )


def _marked(session: Session, environment: Environment, status: Status) -> Environment:
    """The record with another status, written if it can be: a full disk must not keep machines alive."""
    try:
        return session.environments.update(environment, status=status)
    except OSError:
        return environment


def _verify(session: Session, environment: Environment) -> list[str]:
    """Removes what is left of an environment, and says what would not go, as the cloud tells it."""
    try:
        left = _left(session, environment)
        if not left:
            return []
        session.progress.note(f"Still there of {environment.id}: {', '.join(left)}; removing it")
        session.cloud.remove(environment)
        return session.cloud.remaining(environment)
    except StillThereError as error:
        return [error.message]
    except ProvisionerError as error:
        _marked(session, environment, "unverified")
        return [f"the cloud did not say what is left: {error.message}"]


def _left(session: Session, environment: Environment) -> list[str]:
    """Asks the cloud what is left; twice only if an apply began and nobody knows how far it came."""
    left = session.cloud.remaining(environment)
    if left or environment.endpoints or not environment.placement:
        return left
    # A cloud may take a moment to show what it has just made.
    time.sleep(SECOND_LOOK_SECONDS)
    return session.cloud.remaining(environment)
