"""Destroys machines until the cloud confirms that they are gone. Nothing that fails on the way prevents it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from provisioner.base.clock import now
from provisioner.base.errors import InfrastructureError, ProvisionerError, StillThereError
from provisioner.base.models import Environment, Status
from provisioner.base.progress import SURVIVABLE, best_effort, best_effort_within, describe
from provisioner.machines import claims
from provisioner.machines.connect import end_kept
from provisioner.machines.create import stack_of
from provisioner.machines.recordings import is_archived, keep_captures, keep_logs, sealed
from provisioner.session import Session

# EC2 API reference, "Eventual consistency": seconds, as a rule.
SECOND_LOOK_SECONDS = 5.0
# A cloud's answers about consoles take seconds, with its client's own retries up to a minute.
LOGS_SECONDS = 60.0


def clear_away(session: Session, environment: Environment) -> None:
    """Keeps an environment's logs as far as possible, and destroys its machines. Every clean-up ends here.

    Raises:
        StillThereError: something is still there, or the cloud could not be asked; record and reservation stay.
        InfrastructureError: all is gone, but the reservation could not be settled; record and reservation stay.
    """
    session = session.steady()
    what = f"Keeping the logs of {environment.id}"
    logs = session.environments.live_logs(environment.id)
    best_effort_within(session.progress, what, LOGS_SECONDS, lambda: keep_logs(session, environment, logs))
    keep_captures(session, environment)
    destroy_machines(session, session.environments.last_known(environment))


def destroy_machines(session: Session, *environments: Environment) -> None:
    """Destroys machines, asks the cloud whether they are gone, removes the rest, and archives the records.

    Safe to repeat, and after a crash at any moment. Terraform's exit code is not believed: killed at the wrong moment,
    Terraform forgets a machine, and then destroys nothing and exits with 0.

    Args:
        environments: environments of one stack, for which Terraform runs once. A single one of a stack that others
            share is removed without Terraform if the stack's state is on this controller: it stops costing at once, and
            no provider has to start.

    Raises:
        StillThereError: something is still there, or the cloud could not be asked; record and reservation stay.
        InfrastructureError: all is gone, but a reservation could not be settled; it stays, with its record.
    """
    session = session.steady()
    ran = {environment.id: claims.still_runs(session, environment) for environment in environments}
    environments = tuple(marked(session, environment, "destroying") for environment in environments)
    stack = stack_of(session, environments[0])
    failure: BaseException | None = None
    without_terraform = len(environments) == 1 and environments[0].stack != environments[0].id and not stack.is_remote
    try:
        stack.await_idle(session.progress.note)
        try:  # before Terraform removes what would end them at their time
            ended = session.cloud.end_machines(environments)
        except InfrastructureError as error:
            session.progress.note(f"Ending the machines with all the rest: {error.message}")
        else:
            _settle_ended(session, environments, ended, ran)
        if without_terraform:
            session.cloud.remove(environments[0])
        else:
            stack.remove({environment.id for environment in environments}, session.progress.note)
    except SURVIVABLE as error:  # whatever it is, the cloud is asked and told to remove the rest
        failure = error
    still_there = {each.id: remaining for each in environments if (remaining := _verify(session, each))}
    gone = [environment for environment in environments if environment.id not in still_there]
    if (failure or without_terraform) and gone:
        # The cloud confirms that they are gone, so the stack's files about them describe nothing.
        with best_effort(session.progress, f"Tidying the stack {environments[0].stack}"):
            stack.forget({environment.id for environment in gone})
    problems = [problem for each in gone if (problem := _conclude(session, each, ran=ran[each.id]))]
    if still_there:
        problems[:0] = [f"{name} is not gone: {', '.join(remaining)}" for name, remaining in still_there.items()]
        raise StillThereError(
            "; ".join(problems),
            hint=f"provisioner destroy {' '.join(still_there)} tries again.",
            details=failure.details if isinstance(failure, ProvisionerError) else None,
        )
    if problems:
        names = " ".join(each.id for each in gone if session.environments.directory(each.id).exists())
        raise InfrastructureError("; ".join(problems), hint=f"provisioner destroy {names} tries that again.")


def _settle_ended(
    session: Session, environments: Iterable[Environment], ended: set[str], ran: Mapping[str, bool | None]
) -> None:
    """Settles environments whose machines cost nothing any more: other launches need not wait until they are gone.

    An environment without known machines waits: more of it may exist than the cloud shows.
    """
    for environment in environments:
        if environment.instance_ids and ended.issuperset(environment.instance_ids):
            with best_effort(session.progress, f"Settling {environment.id} early"):
                claims.settle(session, environment, ran=ran[environment.id])


def _conclude(session: Session, environment: Environment, *, ran: bool | None) -> str:
    """Settles, archives and releases an environment that is gone; returns what could not be done, or nothing."""
    # A command that outlasted the wait for its lock may have recorded more.
    current = session.environments.last_known(environment)
    environment = current.model_copy(update={"status": environment.status, "gone_at": now()})
    with best_effort(session.progress, f"Ending the connections kept to {environment.id}"):
        end_kept(session, environment)
    problem = ""
    step = "its reservation is not settled"
    try:
        claims.settle(session, environment, ran=ran)
        step = "its record is not archived"
        if is_archived(session, environment):
            session.environments.forget(environment.id)
        else:
            session.environments.archive(sealed(session, environment))
    except SURVIVABLE as error:
        problem = f"{environment.id} is gone, but {step}: {describe(error)}"
    with best_effort(session.progress, f"Releasing {environment.id}"):
        session.leases.release(environment.id)
    return problem


def marked(session: Session, environment: Environment, status: Status) -> Environment:
    """Returns the record with another status, saved if possible: a full disk must not keep machines alive.

    An environment that is marked `destroying` is not worked in any more, whatever becomes of the process that marks it.
    """
    try:
        return session.environments.update(environment, status=status)
    except SURVIVABLE:
        return environment


def _verify(session: Session, environment: Environment) -> list[str]:
    """Asks the cloud what remains of an environment, removes it, and returns what would not go."""
    try:
        remaining = session.cloud.remaining(environment)
        if not remaining and environment.placement and not environment.endpoints:
            # An apply began, and its extent is unknown. A cloud may take a moment to show what it has just created.
            time.sleep(SECOND_LOOK_SECONDS)
            remaining = session.cloud.remaining(environment)
        if not remaining:
            return []
        session.progress.note(f"Still there of {environment.id}: {', '.join(remaining)}; removing it")
        session.cloud.remove(environment)
        return session.cloud.remaining(environment)
    except StillThereError as error:
        return [error.message]
    except SURVIVABLE as error:
        marked(session, environment, "unverified")
        return [f"the cloud did not say whether anything remains: {describe(error)}"]
