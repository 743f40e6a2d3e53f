"""Takes a task's environment through its phases: up, score, destroy.

The only module that knows their order. It times them and cleans up after a failure or Ctrl-C in one of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from provisioner.clock import now
from provisioner.environment import operations
from provisioner.errors import CapacityError, ProvisionerError
from provisioner.family.env_file import check_required
from provisioner.family.loader import TaskFamily
from provisioner.family.scores import ScoreResult
from provisioner.family.setup_data import require_task
from provisioner.images import build
from provisioner.machines import reservations
from provisioner.machines.boot import boot_machines
from provisioner.machines.connect import connect
from provisioner.machines.create import create_machines, record_environment
from provisioner.machines.destroy import destroy_machines
from provisioner.machines.locking import environment_lock
from provisioner.machines.logs import keep_logs
from provisioner.machines.parallel import on_all_machines
from provisioner.models import (
    Destination,
    Environment,
    MachineRecord,
    Phase,
    ProbeResult,
    Role,
    SetupData,
    TaskSetup,
)
from provisioner.remote import isolation
from provisioner.remote.driver import TaskDriver
from provisioner.remote.ssh import Connection
from provisioner.session import Phases, Session
from provisioner.store.environments import new_id


@dataclass(frozen=True)
class Plan:
    """The plan of an environment, made before anything of it exists.

    Args:
        setup: the task's setup data.
        setup_data: the setup data of the whole family.
        records: image and size of each machine.
    """

    family: TaskFamily
    task: str
    setup: TaskSetup
    setup_data: SetupData
    records: dict[Role, MachineRecord]
    allowed: tuple[Destination, ...]


Create = Callable[[Session, Environment], Environment]


def _create_alone(session: Session, environment: Environment) -> Environment:
    [created] = create_machines(session, [environment])
    return created


def plan(session: Session, family: TaskFamily, task: str, allowed: tuple[Destination, ...] = ()) -> Plan:
    """Chooses the machines and builds the missing images.

    Raises:
        UsageError: the task is unknown, variables are missing, or the cloud cannot provide the machines.
        ImageBuildError: an image could not be built.
    """
    resources = family.manifest.resources(task)
    # The manifest can be read without the family's code, so impossible resources are refused before a build.
    sizes = session.cloud.choose(resources, None)
    family_image, setup_data = build.family_image(session, family)
    setup = require_task(setup_data, family.name, task)
    check_required(session.variables, setup)
    built: dict[Role, str] = {"primary": family_image}
    if spec := setup.aux_vm_spec:
        sizes = session.cloud.choose(resources, spec)
        built["aux"] = build.aux_image(session, family, spec, sizes["aux"])
    sizes = {**sizes, "primary": build.fitting_image(sizes["primary"], family)}
    records = {role: MachineRecord(image=built[role], size=sizes[role], user="root") for role in built}
    return Plan(family, task, setup, setup_data, records, () if setup.full_internet else allowed)


def up(session: Session, family: TaskFamily, task: str, allowed: tuple[Destination, ...] = ()) -> Environment:
    """Brings one environment up to the point where an agent may start.

    Args:
        allowed: the destinations that an environment without internet may reach.

    Returns:
        the environment's record, with status `ready`.

    Raises:
        ProvisionerError: it failed; everything that was created has been destroyed.
    """
    environment = bring_up(session, family, task, allowed)
    return leave(session, environment)


def leave(session: Session, environment: Environment) -> Environment:
    """Leaves an environment to the operator: it outlives this command until its time to live ends."""
    environment = session.environments.update(environment, attended=False)
    session.leases.release(environment.id)
    return environment


def bring_up(session: Session, family: TaskFamily, task: str, allowed: tuple[Destination, ...]) -> Environment:
    """Brings up an environment that this command looks after, in the first place where the cloud has capacity."""
    try:
        return _up_here(session, family, task, allowed)
    except CapacityError as error:
        cloud = session.cloud.fallback()
        if cloud is None:
            raise
        session.progress.note(f"{error.message} Trying another place.")
        return bring_up(replace(session, cloud=cloud), family, task, allowed)


def _up_here(session: Session, family: TaskFamily, task: str, allowed: tuple[Destination, ...]) -> Environment:
    phases = Phases(session.progress)
    with phases.phase("images"):
        planned = plan(session, family, task, allowed)
    return launch(session, planned, new_id(family.name, task), phases)


def launch(
    session: Session, planned: Plan, identity: str, phases: Phases, create: Create = _create_alone
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
    environment = _new_environment(session, planned, identity)
    with environment_lock(session, environment):
        environment = reservations.reserve(session, environment)
        with _cleared_on_failure(session, environment):
            with phases.phase("create"):
                record_environment(session, environment)
                environment = create(session, environment)
            return _make_ready(session, planned, environment, phases)


def adopt(session: Session, planned: Plan, environment: Environment, phases: Phases) -> Environment:
    """Takes over an environment whose machines a killed process created, and in which start() has not begun.

    Raises:
        ProvisionerError: it failed; everything that was created has been destroyed.
    """
    with environment_lock(session, environment) as current, _cleared_on_failure(session, current):
        reservations.take_lease(session, current)
        return _make_ready(session, planned, current, phases)


@contextlib.contextmanager
def _cleared_on_failure(session: Session, environment: Environment) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with session.shield():
            session.progress.note(f"Destroying {environment.id}")
            keep_logs(session, environment)
            destroy_machines(session, session.environments.reread(environment))
        raise


def _new_environment(session: Session, planned: Plan, identity: str) -> Environment:
    created_at = now()
    return Environment(
        id=identity,
        cloud=session.cloud.name,
        stack=identity,
        family=planned.family.name,
        task=planned.task,
        status="creating",
        shared_ledger=bool(session.database),
        attended=True,
        batch=session.spending.batch,
        created_at=created_at,
        expires_at=created_at + session.ttl,
        time_limits=session.time_limits,
        setup=planned.setup,
        has_score=planned.setup_data.has_score,
        has_intermediate_score=planned.setup_data.has_intermediate_score,
        has_aggregate_scores=planned.setup_data.has_aggregate_scores,
        has_teardown=planned.setup_data.has_teardown,
        score_visible_to_agent=planned.family.manifest.scoring(planned.task).visible_to_agent,
        full_internet=planned.setup.full_internet,
        allowed_destinations=planned.allowed,
        machines=planned.records,
    )


def _make_ready(session: Session, planned: Plan, environment: Environment, phases: Phases) -> Environment:
    with phases.phase("boot"):
        connections = boot_machines(session, environment)
    with contextlib.ExitStack() as stack:
        for connection in connections.values():
            stack.enter_context(connection)
        with phases.phase("isolation"):
            results = prove_isolation(session, environment, connections)
            environment = session.environments.update(environment, probes=results)
        driver = operations.driver(session, environment, connections["primary"])
        with phases.phase("start"):
            operations.start(session, environment, driver, skip_chown=planned.setup_data.skip_chown_after_start)
            environment = session.environments.update(environment, started_at=now())
        if environment.has_intermediate_score:
            with phases.phase("first score"):
                environment, _ = operations.intermediate_score(session, environment, driver)
    return session.environments.update(environment, status="ready", phases=tuple(phases.finished))


def prove_isolation(
    session: Session, environment: Environment, connections: dict[Role, Connection]
) -> tuple[ProbeResult, ...]:
    """Runs the probes in all machines at once.

    Raises:
        IsolationError: the machines can reach more, or less, than the permission promises.
    """
    gateways = session.cloud.gateways(environment)
    with isolation.canary() as canary:
        results_by_role = on_all_machines(
            connections,
            lambda role, _: isolation.run(
                connections[role],
                role,
                isolation.request(environment, role, canary.port, gateways),
                environment.full_internet,
            ),
        )
        results = tuple(result for role in connections for result in results_by_role[role])
        isolation.require(results, canary.visited)
    return results


def destroy(session: Session, environment: Environment, prior: Phases | None = None) -> tuple[Phase, ...]:
    """Ends an environment: runs the family's teardown, then destroys the machines until the cloud confirms that.

    Idempotent. A failing teardown is reported and stops nothing.

    Args:
        prior: the phases that are already done.

    Returns:
        all finished phases.

    Raises:
        StillThereError: some of its resources could not be removed.
    """
    phases = prior or Phases(session.progress)
    with environment_lock(session, environment) as environment:
        if not session.environments.directory(environment.id).exists():
            return tuple(phases.finished)
        if environment.has_teardown and environment.started_at and environment.endpoints:
            with phases.phase("teardown"), _reported(session, "teardown"):
                _teardown(session, environment)
        with phases.phase("destroy"):
            keep_logs(session, environment)
            destroy_machines(session, environment)
    return tuple(phases.finished)


def _teardown(session: Session, environment: Environment) -> None:
    with open_driver(session, environment) as driver:
        operations.teardown(session, environment, driver)


@contextlib.contextmanager
def _reported(session: Session, what: str) -> Iterator[None]:
    try:
        yield
    except ProvisionerError as error:
        session.progress.note(f"{what}: {error.message}")


def score(session: Session, environment: Environment, submission: str | None = None) -> tuple[Environment, ScoreResult]:
    """Scores an environment at its end (Task Standard, scoring).

    Args:
        submission: the text to score instead of the submission file.

    Returns:
        the record with its score log, and the result.
    """
    with environment_lock(session, environment) as environment, open_driver(session, environment) as driver:
        return operations.end_score(session, environment, driver, submission)


def intermediate_score(session: Session, environment: Environment) -> tuple[Environment, operations.IntermediateScore]:
    """Scores an environment once before its end (Task Standard, intermediate scoring).

    Returns:
        the record with its score log, and the result.

    Raises:
        UsageError: the family has no intermediate_score.
    """
    with environment_lock(session, environment) as environment, open_driver(session, environment) as driver:
        return operations.intermediate_score(session, environment, driver)


@contextlib.contextmanager
def open_driver(session: Session, environment: Environment) -> Iterator[TaskDriver]:
    """Connects to an environment's primary machine and yields its task driver."""
    with connect(session, environment, "primary") as connection:
        yield operations.driver(session, environment, connection)


def select_for_destroy(
    session: Session, names: Sequence[str], *, everything: bool
) -> tuple[list[Environment], list[str]]:
    """Returns the environments to destroy, and the names of those that are already destroyed.

    Args:
        names: ids, or beginnings or ends of them.
        everything: selects all environments whose records can be read and ignores the names. Directories without a
            record, in which a crash left nothing to destroy, are removed at once.

    Raises:
        UsageError: a name matches no environment, live or destroyed.
    """
    store = session.environments
    if everything:
        for directory in store.unrecorded():
            store.forget(directory.name)
        return store.readable(), []
    matches = {environment.id: environment for environment in (store.find(name, archived=True) for name in names)}
    live = [environment for environment in matches.values() if store.directory(environment.id).exists()]
    return live, [name for name in matches if not store.directory(name).exists()]
