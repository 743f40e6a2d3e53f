"""Destroys machines until the cloud confirms that they are gone."""

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
    """Destroys machines, asks the cloud whether they are gone, removes the rest, and archives the records.

    Safe to repeat, and after a crash at any moment. Terraform's exit code is not believed: killed at the wrong moment,
    Terraform forgets a machine, and then destroys nothing and exits with 0.

    Args:
        environments: environments of one stack, for which Terraform runs once. One that leaves others behind in its
            stack goes without Terraform: it stops costing at once, and no provider has to start.

    Raises:
        StillThereError: something is still there, or the cloud could not be asked; record and reservation stay.
    """
    ran = {environment.id: reservations.still_runs(session, environment) for environment in environments}
    environments = tuple(_marked(session, environment, "destroying") for environment in environments)
    stack = stack_of(session, environments[0])
    failure: ProvisionerError | None = None
    without_terraform = len(environments) == 1 and environments[0].stack != environments[0].id and not stack.is_remote
    try:
        if without_terraform:
            stack.rest(session.progress.note)
            session.cloud.remove(environments[0])
        else:
            stack.remove({environment.id for environment in environments}, session.progress.note)
    except (InfrastructureError, HostError) as error:
        failure = error
    still_there = {each.id: remaining for each in environments if (remaining := _verify(session, each))}
    gone = [environment for environment in environments if environment.id not in still_there]
    if (failure or without_terraform) and gone:
        # The cloud confirms that they are gone, so the stack's files about them describe nothing.
        stack.forget({environment.id for environment in gone})
    for environment in gone:
        reservations.settle(session, environment, ran=ran[environment.id])
        session.environments.archive(environment)
        session.leases.release(environment.id)
    if still_there:
        raise StillThereError(
            "; ".join(f"{name} is not gone: {', '.join(remaining)}" for name, remaining in still_there.items()),
            hint=f"provisioner destroy {' '.join(still_there)} tries again.",
            details=failure.details if failure else None,
        )


def _marked(session: Session, environment: Environment, status: Status) -> Environment:
    """Returns the record with another status, saved if possible: a full disk must not keep machines alive."""
    try:
        return session.environments.update(environment, status=status)
    except OSError:
        return environment


def _verify(session: Session, environment: Environment) -> list[str]:
    """Asks the cloud what remains of an environment, removes it, and returns what would not go."""
    try:
        remaining = _remaining(session, environment)
        if not remaining:
            return []
        session.progress.note(f"Still there of {environment.id}: {', '.join(remaining)}; removing it")
        session.cloud.remove(environment)
        return session.cloud.remaining(environment)
    except StillThereError as error:
        return [error.message]
    except ProvisionerError as error:
        _marked(session, environment, "unverified")
        return [f"the cloud did not say what is left: {error.message}"]


def _remaining(session: Session, environment: Environment) -> list[str]:
    """Asks the cloud what remains: once, or twice if an apply began and its extent is unknown."""
    remaining = session.cloud.remaining(environment)
    if remaining or environment.endpoints or not environment.placement:
        return remaining
    # A cloud may take a moment to show what it has just created.
    time.sleep(SECOND_LOOK_SECONDS)
    return session.cloud.remaining(environment)
