"""Takes a task's environment through its phases.

`bring_up` plans it and builds its images. `launch` reserves its cost, records it and creates its machines.
`_make_ready` boots them, proves their isolation, and runs `start()`. `score` and `destroy` follow. This is the only
module that knows the order; it times the phases, and cleans up after a failure or Ctrl-C in one of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial

from provisioner.base.clock import extended, now
from provisioner.base.errors import (
    CapacityError,
    Interrupted,
    IsolationError,
    LivenessLostError,
    MachineLostError,
    ProvisionerError,
    UsageError,
)
from provisioner.base.models import Destination, Environment, Outcome, Phase
from provisioner.base.printable import last_lines
from provisioner.base.progress import best_effort, best_effort_within
from provisioner.base.signals import wait
from provisioner.clouds.guest_files import GUEST
from provisioner.driver.task_driver import TaskDriver
from provisioner.environment import agent, operations, outcomes
from provisioner.environment.planning import Plan, new_environment, plan
from provisioner.family.loader import TaskFamily
from provisioner.family.scores import ScoreResult
from provisioner.isolation.proof import prove_isolation
from provisioner.machines import claims
from provisioner.machines.boot import boot_machines
from provisioner.machines.claims import destruction_lock, environment_lock, take_lease
from provisioner.machines.connect import connect
from provisioner.machines.destroy import clear_away, marked
from provisioner.machines.launch import (
    Create,
    clear_after_failure,
    create_alone,
    launched,
    looked_after,
    tell_of_destruction,
)
from provisioner.session import Phases, Session
from provisioner.ssh.connection import Connection
from provisioner.store.environments import new_id

# To log in for the teardown, and to end it, beyond the family's own time.
TEARDOWN_GRACE_SECONDS = 60.0
# Between attempts to score, each of which connects for a minute.
SCORING_PAUSES_SECONDS = (2.0, 30.0, 60.0)


@looked_after
def up(session: Session, family: TaskFamily, task: str, allowed: tuple[Destination, ...] = ()) -> Environment:
    """Brings one environment up to the point where an agent may start.

    Args:
        allowed: the destinations that an environment without internet may reach.

    Returns:
        the environment's record, with status `ready`.

    Raises:
        ProvisionerError: it failed; everything that was created has been destroyed.
    """
    return left_to_operator(session, bring_up(session, family, task, allowed))


def left_to_operator(session: Session, environment: Environment) -> Environment:
    """Leaves an environment that has come up to the operator. If that fails, it is destroyed."""
    try:
        return leave(session, environment)
    except BaseException as error:  # no process would look after it
        with session.shield():
            tell_of_destruction(session, environment, error)
            destroy(session, environment)
        raise


def leave(session: Session, environment: Environment) -> Environment:
    """Leaves an environment to the operator: it outlives this command until its time to live ends.

    Raises:
        UsageError: it was destroyed in the meantime, or its destruction has begun.
    """
    with environment_lock(session, environment) as current:
        environment = session.environments.update(current, attended=False)
    session.leases.release(environment.id)
    return environment


def bring_up(
    session: Session,
    family: TaskFamily,
    task: str,
    allowed: tuple[Destination, ...],
    create: Create = create_alone,
) -> Environment:
    """Brings up an environment that this command looks after, in the first place where the cloud has capacity."""
    try:
        phases = Phases(session.progress)
        with phases.phase("images"):
            planned = plan(session, family, task, allowed)
        return launch(session, planned, new_id(family.name, task), phases, create)
    except CapacityError as error:
        cloud = session.cloud.fallback()
        if cloud is None:
            raise
        session.progress.note(f"{error.message} Trying another place.")
        return bring_up(replace(session, cloud=cloud), family, task, allowed, create)


def launch(
    session: Session, planned: Plan, identity: str, phases: Phases, create: Create = create_alone
) -> Environment:
    """Brings up an environment that this process looks after: reservation, machines, isolation, start.

    Args:
        identity: its id, which no other environment may ever have had.
        phases: the phases that are already done.
        create: creates the machines of a recorded environment.

    Returns:
        the environment's record, with status `ready`.

    Raises:
        ProvisionerError: it failed; everything that was created has been destroyed.
    """
    environment = new_environment(session, planned, identity)
    with launched(session, environment, may_keep, phase=phases.phase("create"), create=create) as environment:
        return _make_ready(session, planned, environment, phases)


def take_over(session: Session, planned: Plan, environment: Environment, phases: Phases) -> Environment:
    """Takes over an environment whose machines a killed process created, and in which start() has not begun.

    Raises:
        ProvisionerError: it failed; everything that was created has been destroyed.
    """
    with environment_lock(session, environment) as current:
        try:
            take_lease(session, current)
            return _make_ready(session, planned, current, phases)
        except BaseException as error:
            clear_after_failure(session, current, error, may_keep)
            raise


def may_keep(session: Session, environment: Environment, error: BaseException) -> bool:
    """Returns whether a failed environment is left to the operator: never one that may not be isolated."""
    return session.keep_failed and bool(environment.probes) and not isinstance(error, IsolationError)


def _make_ready(session: Session, planned: Plan, environment: Environment, phases: Phases) -> Environment:
    """Boots, proves the isolation of, and starts an environment that has machines, and whose lock this process has."""
    with proven(session, environment, phases) as (environment, primary):
        driver = operations.driver(session, environment, primary)
        with phases.phase("start"):
            operations.start(session, environment, driver, skip_chown=planned.setup_data.skip_chown_after_start)
            environment = session.environments.update(environment, started_at=now())
        if environment.has_intermediate_score:
            with phases.phase("first score"):
                environment = operations.first_score(session, environment, driver)
    return session.environments.update(environment, status="ready", phases=tuple(phases.finished))


@contextlib.contextmanager
def proven(session: Session, environment: Environment, phases: Phases) -> Iterator[tuple[Environment, Connection]]:
    """Waits until an environment's machines have booted, and proves their isolation.

    Yields:
        the record with what was proven, and root's connection to the primary machine.

    Raises:
        IsolationError: something is not as the permission promises.
        MachineLostError: a machine did not come up.
    """
    with phases.phase("boot"):
        connections = boot_machines(session, environment)
    with contextlib.ExitStack() as stack:
        for connection in connections.values():
            stack.enter_context(connection)
        with phases.phase("isolation"):
            results = prove_isolation(session, environment, connections)
        # Saved only after the proof: a record that has probes means that start() may have begun.
        yield session.environments.update(environment, probes=results), connections["primary"]
        if session.keep:
            session.keep(connections)
            stack.pop_all()


def destroy(session: Session, environment: Environment, prior: Phases | None = None) -> tuple[Phase, ...]:
    """Ends an environment: runs the family's teardown, then destroys the machines until the cloud confirms that.

    Idempotent. A teardown that fails or does not end is reported and stops nothing.

    Args:
        prior: the phases that are already done.

    Returns:
        all finished phases.

    Raises:
        StillThereError: some of its resources could not be removed.
        InfrastructureError: all is gone, but its reservation could not be settled.
    """
    session = session.steady()
    phases = prior or Phases(session.progress)
    with destruction_lock(session, environment) as environment:
        if not session.environments.directory(environment.id).exists():
            return tuple(phases.finished)
        environment = marked(session, environment, "destroying")  # before teardown(), after which no score counts
        if environment.has_teardown and environment.started_at and environment.endpoints:
            with phases.phase("teardown"):
                limit_seconds = environment.time_limits.teardown_seconds + TEARDOWN_GRACE_SECONDS
                best_effort_within(
                    session.progress, "teardown", limit_seconds, partial(_teardown, session, environment)
                )
        with phases.phase("destroy"):
            clear_away(session, environment)
    return tuple(phases.finished)


def _teardown(session: Session, environment: Environment) -> None:
    with open_driver(session, environment) as driver:
        operations.teardown(session, environment, driver)


def score(
    session: Session, environment: Environment, submission: str | None = None, *, readmit_agent: bool = False
) -> tuple[Environment, ScoreResult]:
    """Scores an environment at its end (Task Standard, scoring). The agent's processes are ended first.

    If the connection breaks and the machine still runs, it is scored again.

    Args:
        submission: the text to score instead of the submission file.
        readmit_agent: whether the user agent may log in again afterwards.

    Returns:
        the record with its score log, and the result.

    Raises:
        UsageError: it has been destroyed, or its destruction has begun.
        AgentError: an agent had begun, and left the machine so that it cannot be scored.
        MachineLostError: the machine was lost, and no agent is to blame.
    """
    with environment_lock(session, environment) as environment, outcomes.attributing_loss(session, environment):
        for pause in (*SCORING_PAUSES_SECONDS, None):
            try:
                environment, result = _score_once(session, environment, submission, readmit_agent=readmit_agent)
                break
            except MachineLostError as error:
                if pause is None or outcomes.primary_runs(session, environment) is False:
                    raise
                session.progress.note(f"{error.message} Scoring again.")
            wait(pause, session.check)
        with best_effort(session.progress, f"Recording the score of {environment.id}"):  # it counts even if that fails
            outcome = Outcome(
                status=result.kind, score=result.score, message=result.message, details=result.details, scored_at=now()
            )
            environment = session.environments.update(environment, outcome=outcome)
        return environment, result


def _score_once(
    session: Session, environment: Environment, submission: str | None, *, readmit_agent: bool
) -> tuple[Environment, ScoreResult]:
    with connect(session, environment, "primary") as connection:
        try:
            agent.stop(connection)
            driver = operations.driver(session, environment, connection)
            return operations.end_score(session, environment, driver, submission)
        finally:
            if readmit_agent:
                with session.shield(), best_effort(session.progress, "Letting the agent in again"):
                    agent.readmit(connection)


def intermediate_score(session: Session, environment: Environment) -> tuple[Environment, operations.IntermediateScore]:
    """Scores an environment once before its end (Task Standard, intermediate scoring).

    Returns:
        the record with its score log, and the result.

    Raises:
        UsageError: the family has no intermediate_score, or the environment's destruction has begun.
    """
    with environment_lock(session, environment) as environment, open_driver(session, environment) as driver:
        return operations.intermediate_score(session, environment, driver)


@contextlib.contextmanager
def open_driver(session: Session, environment: Environment) -> Iterator[TaskDriver]:
    """Connects to an environment's primary machine and yields its task driver."""
    with connect(session, environment, "primary") as connection:
        yield operations.driver(session, environment, connection)


def extend(session: Session, environment: Environment, by: timedelta) -> Environment:
    """Extends an environment's time to live.

    Args:
        by: how much longer it may live.

    Returns:
        the updated record.

    Raises:
        UsageError: it has ended or its destruction has begun, it would live too long, or its reservation is in a
            database that is not configured.
        BudgetError: the longer time does not fit a budget; nothing has changed.
        MachineLostError: the timer inside a machine could not be moved, so the machine ends at its earlier time.
    """
    with environment_lock(session, environment) as environment:
        if environment.status != "ready" and not environment.endpoints:
            raise UsageError(f"{environment.id} is not up: its status is {environment.status}.")
        if environment.shared_ledger and not session.database:
            raise UsageError(
                f"The reservation of {environment.id} is in a database that workers share.",
                hint="Set PROVISIONER_DATABASE=postgresql://... to that database.",
            )
        expires_at = extended(environment.created_at, environment.expires_at, by, now())
        longer = environment.model_copy(update={"expires_at": expires_at})
        spending = session.spending
        session.ledger.extend(
            environment.id,
            expires_at,
            claims.worst_cost(longer),
            # The standing budgets of the project that it was launched under.
            lambda entry: spending.model_copy(update={"project": entry.project}).budgets(entry.launched_at),
        )
        longer = session.environments.update(longer, expires_at=expires_at)
        session.cloud.move_ttl(longer)
        _move_timers(session, longer)
        return longer


def _move_timers(session: Session, environment: Environment) -> None:
    program = (GUEST / "ttl.sh").read_text()
    moment = str(int(environment.expires_at.timestamp()))
    for role in environment.machines:
        try:
            with connect(session, environment, role) as connection:
                done = connection.run(["sh", "-c", program, "ttl", moment, "move"], timeout_seconds=60)
            said = last_lines(done.stderr.decode(errors="replace"), 500) if done.exit_code else ""
        except (Interrupted, LivenessLostError):
            raise
        except (ProvisionerError, TimeoutError) as error:
            said = str(error)
        if said:
            raise MachineLostError(
                f"The {role} machine of {environment.id} could not be extended and ends at its earlier time.",
                hint="Everything else is extended. As root in the machine: systemctl stop provisioner-ttl.timer",
                details=said,
            )
