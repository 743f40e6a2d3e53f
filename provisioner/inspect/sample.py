"""The machines of one sample, from launch to end. Blocks: provisioner.inspect.blocking runs it in threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from provisioner.base.clock import now
from provisioner.base.config import Settings, load_settings
from provisioner.base.errors import (
    CommandTimeoutError,
    Interrupted,
    MachineLostError,
    NotStartedError,
    ProvisionerError,
    ShortageError,
    TaskError,
    UsageError,
)
from provisioner.base.models import Destination, Environment, Phase, Role
from provisioner.base.printable import printable
from provisioner.clouds.cloud import Cloud
from provisioner.clouds.registry import Where, open_cloud
from provisioner.costs.ledger import Spending
from provisioner.environment import lifecycle, outcomes, planning, snapshots
from provisioner.environment.allowlist import parse_destination, resolve
from provisioner.environment.operations import IntermediateScore
from provisioner.family.check import refuse_mistakes
from provisioner.family.env_file import load_env_file
from provisioner.family.loader import TaskFamily, load_family, refuse_env_file_inside
from provisioner.family.scores import ScoreResult
from provisioner.inspect import blocking, services
from provisioner.inspect.blocking import Listener, is_new
from provisioner.inspect.compose_project import Project
from provisioner.inspect.configuration import Configuration, operators_settings
from provisioner.inspect.evals import Origin, time_to_live
from provisioner.inspect.failures import LossError, NotUpError
from provisioner.inspect.machine_family import TASK, engine_family, family_of_machine, project_of
from provisioner.inspect.services import MEMORY_SECONDS, MOST_SENTENCES, Watch, on_console
from provisioner.machines.apply_batcher import ApplyBatcher, host_slots
from provisioner.machines.claims import environment_lock
from provisioner.machines.connect import connect
from provisioner.session import Phases, Session
from provisioner.ssh.connection import Connection
from provisioner.store.files import Leases
from provisioner.store.home import Home

Result = TypeVar("Result")

LEASES = Leases()
_LOCK = threading.Lock()
_SHARED: dict[tuple[object, ...], Any] = {}


def _shared(key: tuple[object, ...], make: Callable[[], Result]) -> Result:
    """Makes something once for all samples of this process, although several may ask for it at once."""
    with _LOCK:
        if key not in _SHARED:
            _SHARED[key] = make()
        return cast(Result, _SHARED[key])


def process_spending(budget: Decimal | None) -> Spending:
    """One command for all samples of this process with the same budget, so that they share it."""
    return _shared(("spending", budget), lambda: Spending.of(load_settings(), budget))


def apply_batcher() -> ApplyBatcher:
    """Creates the machines of samples that start at about the same time together."""
    return _shared(("batcher",), lambda: ApplyBatcher("inspect", host_slots()))


def shared_cloud(home: Home, settings: Settings, where: Where) -> Cloud:
    """Opens a cloud once for all samples: those of one cloud may share stacks, and ask AWS's API together.

    Raises:
        UsageError: there is no such place.
    """
    return _shared(("cloud", home.root, where, settings.require_kvm), lambda: open_cloud(home, settings, where))


LABEL_CHARACTERS = 200
# Families that were checked before their tasks were known, with their env files: hundreds of tasks need not look again.
CHECKED: set[tuple[Path, str]] = set()
# Of a record, with those of its family.
MOST_WARNINGS = 50
# So long a sample's end looks once more at its machines, before they are destroyed.
LAST_LOOK_SECONDS = 10.0
# A machine that is out of memory may be lost only some time later.
BEFORE_LOSS_SECONDS = 60.0


@dataclass(frozen=True)
class Ending:
    """How a sample's machines ended.

    Args:
        environment: the environment's id.
        phases: of their destruction.
    """

    environment: str
    phases: tuple[Phase, ...]


def family_of(configuration: Configuration, project: Project | None = None) -> tuple[TaskFamily, str]:
    """Returns the task family that makes a configuration's machines, and its task.

    Args:
        project: the services of its compose file; None if it names none.

    Raises:
        UsageError: it is not valid.
    """
    if configuration.family:
        family = load_family(Path(configuration.family))
        if configuration.env_file:
            refuse_env_file_inside(family, Path(configuration.env_file))
        return family, configuration.task
    if project:
        return engine_family(project, configuration), TASK
    families: dict[Role, TaskFamily] = {
        role: replace(family_of_machine(machine, configuration.internet), hostname=machine.name)
        for role, machine in configuration.by_role.items()
    }
    primary = families.pop("primary")
    return replace(primary, neighbours=families), TASK


def open_session(configuration: Configuration, origin: Origin) -> Session:
    """Opens the session of a sample.

    Raises:
        UsageError: the configuration or the operator's settings are not valid.
    """
    listener = Listener(f"{origin.task} {origin.sample}".strip())
    settings = load_settings().requiring_kvm(configuration.require_kvm)
    home = Home.default()
    home.make()
    regions = (configuration.region,) if configuration.region else ()
    budget = None if configuration.budget is None else Decimal(str(configuration.budget))
    label = f"{origin.task} {origin.sample}".encode(errors="replace").decode()  # a dataset's words
    return Session(
        home=home,
        cloud=shared_cloud(home, settings, Where(configuration.cloud, regions, spot=configuration.spot)),
        progress=listener,
        variables=load_env_file(Path(configuration.env_file)) if configuration.env_file else {},
        ca_bundle=settings.ca_bundle_path,
        base_image=settings.base_image,
        ttl=time_to_live(configuration, origin, listener.note),
        time_limits=settings.time_limits,
        spending=process_spending(budget).model_copy(update={"batch": origin.batch}),
        leases=LEASES,
        label=printable(" ".join(label.split()))[:LABEL_CHARACTERS],
        check=blocking.check,
    )


class SampleMachines:
    """The machines of one sample.

    Args:
        configuration: with the sample's metadata in it.
        origin: which sample it is.
        metadata: the sample's, for a compose file.

    Attributes:
        snapshot: the frozen environment that the machines are a copy of; empty if they come up anew.
        frozen_as: the name under which the machines were frozen; empty if they were not.
        memory: what was told of their memory.
        notes: what the sample's log is to be told.
    """

    def __init__(self, configuration: Configuration, origin: Origin, metadata: Mapping[str, Any] | None = None) -> None:
        self.configuration, self._origin = configuration, origin
        self.project = project_of(configuration, metadata or {})
        self.snapshot = self.frozen_as = ""
        # Set once Inspect cancels the launch. Machines boot in threads of their own, which must notice.
        self.cancelled = threading.Event()
        self._clearing_away = False
        opened = open_session(configuration, origin)
        self.session = replace(opened, check=self._check, shield=self._shield, keep=self._keep)
        self._family, self._task = family_of(configuration, self.project)
        self.memory = Watch()
        self.notes: deque[str] = deque(maxlen=MOST_SENTENCES)
        self._lock, self._warnings_lock = threading.Lock(), threading.Lock()
        # A limiter for each machine: a slow machine does not delay calls to the others.
        self._connecting: dict[Role, threading.Lock] = {}
        self._connections: dict[Role, Connection] = {}
        self._losses: dict[Role, LossError] = {}
        self._is_closed = False
        self._environment: Environment | None = None
        # Whose launch began last. If it fails, all of it has been destroyed, unless that failed, too.
        self._begun: Environment | None = None

    @property
    def environment(self) -> Environment:
        """The environment's record, once it is up."""
        if self._environment is None:
            raise MachineLostError("The sample's machines are not up.")
        return self._environment

    @property
    def failed(self) -> Environment | None:
        """An environment that has not come up and could not be destroyed either; None if there is none."""
        begun = None if self._environment else self._begun
        return begun if begun and self.session.environments.exists(begun.id) else None

    @property
    def begun(self) -> Environment | None:
        """The environment whose launch began last, whatever became of it; None if none has begun."""
        return self._environment or self._begun

    def _check(self) -> None:
        if self._clearing_away:
            return
        if self.cancelled.is_set():
            raise Interrupted("Inspect cancelled it.")
        blocking.check()

    @contextmanager
    def _shield(self) -> Iterator[None]:
        """Lets a clean-up finish although a cancellation began it."""
        before, self._clearing_away = self._clearing_away, True
        try:
            yield
        finally:
            self._clearing_away = before

    def build_images(self) -> None:
        """Builds the images that are missing, so that samples need not wait for each other to do so.

        That memory has no room for the machines now is no error: the samples wait for it.

        Raises:
            UsageError: the task family surely fails.
            ProvisionerError: a build failed, or the cloud cannot provide the machines.
        """
        self.refuse_mistakes()
        if self.configuration.budget is not None and self.configuration.cloud == "local":
            self.session.progress.note("`budget` bounds nothing here: machines of the local cloud are free of charge.")
        notes = [*self.project.notes] if self.project else []
        if self.project and self.project.online and self.configuration.internet == "none":
            online = ", ".join(self.project.online)
            notes.append(f"No internet for {online}, which have it in Docker: `internet: full` or `allow` give it.")
        for note in notes:
            if is_new(self._origin.task, note):
                self.session.progress.note(note)
        with contextlib.suppress(ShortageError):
            planned = planning.plan(self.session, self._family, self._task, self._allowed())
            self._refuse_internet(has_it=planned.setup.full_internet)

    def refuse_mistakes(self) -> None:
        """Refuses a task family that surely fails, before its image is built: as `provisioner up` does.

        Raises:
            UsageError: it has mistakes, no such task, or requires variables that are not set.
        """
        if self.configuration.family and (self._family.directory, self.configuration.env_file) not in CHECKED:
            refuse_mistakes(self._family, self._task, self.session.variables)

    def bring_up(self) -> None:
        """Brings the machines up, proven isolated: anew, or as a copy of frozen ones.

        Raises:
            BudgetError: they do not fit the budget now.
            ProvisionerError: it failed; everything that was created has been destroyed.
        """

        def create(session: Session, environment: Environment) -> Environment:
            self._begun = environment
            self._refuse_internet(has_it=environment.full_internet)
            return apply_batcher().create(session, environment)

        if self.snapshot:
            self._environment = snapshots.bring_up(self.session, self.snapshot, create)
        else:
            self._environment = lifecycle.bring_up(self.session, self._family, self._task, self._allowed(), create)

    def wait_until_ready(self) -> None:
        """Waits until `ready` of each machine succeeds and its services stay up, and notes what ended again and again.

        Raises:
            NotUpError: a machine does not become ready.
        """

        def pause() -> None:
            self.session.check()
            time.sleep(services.PAUSE_SECONDS)

        for role, machine in self.configuration.by_role.items():
            if machine.ready or machine.services:
                with self.more_phases() as phases, phases.phase("ready"):
                    notes = self.on(role, partial(services.wait_until_ready, machine, pause=pause))
                for note in notes:
                    self.session.progress.note(note)

    def start_containers(self) -> list[services.Container]:
        """Starts the services of a compose file, which a copy has already, and returns their containers.

        Raises:
            ServicesError: a service is not up.
        """
        if not self.project:
            return []
        allowed = self.environment.allowed_destinations
        fresh = partial(services.start, self.project, allowed=allowed)
        with self.more_phases() as phases, phases.phase("services"):
            containers = self.on("primary", partial(services.running, self.project) if self.snapshot else fresh)
        self.memory.services = {container.identity: container.service for container in containers}
        return containers

    def _refuse_internet(self, *, has_it: bool) -> None:
        """Refuses a family's task that has the internet against the operator's settings, which no package may widen."""
        operators = operators_settings()
        if has_it and operators.values.get("internet") == "none":
            raise UsageError(
                f"{self._family.title}: {self._task} has the permission full_internet, and {operators.where} says "
                "`internet: none`.",
                hint="Leave the task out, or remove `internet` there.",
            )

    def freeze(self) -> str:
        """Freezes the machines, and returns the snapshot's name. This process must remove or leave the snapshot.

        Raises:
            ProvisionerError: it failed; the machines continue.
        """
        name = f"fork-{self.environment.id}"
        with self.more_phases() as phases:
            snapshots.freeze(self.session, self.environment, name, phases, attended=True)
        self.frozen_as = name
        return name

    @contextmanager
    def more_phases(self) -> Iterator[Phases]:
        """Adds phases of machines that are up to those of their record."""
        phases = Phases(self.session.progress)
        yield phases
        done = (*self.environment.phases, *phases.finished)
        self._environment = self.session.environments.update(self.environment, phases=done)

    def _allowed(self) -> tuple[Destination, ...]:
        return resolve([parse_destination(text) for text in self.configuration.allow])

    def shortage(self, count: int) -> str:
        """Says that memory has no room now for so many more samples whose configuration says how much they take.

        Raises:
            UnavailableError: this host never has the memory.
        """
        machines = self.configuration.machines
        sized = self.project or len(machines) > 1 or any(each.memory_gb for each in machines)
        if self.configuration.cloud != "local" or not sized:
            return ""
        families: dict[Role, TaskFamily] = {"primary": self._family, **self._family.neighbours}
        sizes = {role: planning.primary_size(self.session, family, self._task) for role, family in families.items()}
        return self.session.cloud.shortage(sizes, count)

    def _connection(self, role: Role) -> Connection:
        """Returns root's open connection to a machine."""
        with self._lock:
            connecting = self._connecting.setdefault(role, threading.Lock())
        with connecting:
            kept = self._connections.get(role)
            if kept and kept.active:
                return kept
            if kept:
                kept.close()
            return self._kept(role, connect(self.session, self.environment, role))

    def _keep(self, connections: Mapping[Role, Connection]) -> None:
        for role, connection in connections.items():
            self._kept(role, connection)

    def _kept(self, role: Role, connection: Connection) -> Connection:
        with self._lock:
            if not self._is_closed:
                self._connections[role] = connection
                return connection
        connection.close()
        raise MachineLostError("The sample has ended, and its machines with it.")

    def on(self, role: Role, work: Callable[[Connection], Result]) -> Result:
        """Works on a machine over its open connection.

        Raises:
            LossError: the machine does not answer, breaks the rules of the connection, or was lost in an earlier call.
                The message says what the cloud says of it.
            NotUpError, CommandTimeoutError: the work says so, or did not end in time. As for a loss, the message also
                says whether the machine is out of memory.
            Interrupted: it was cancelled.
        """
        if loss := self._losses.get(role):
            raise _repeated(loss)
        begin = time.monotonic()
        try:
            connection = self._connection(role)
            try:
                return work(connection)
            except (NotUpError, CommandTimeoutError):
                self.look_for_shortage(role, connection)
                raise
        except Interrupted:
            raise
        except ProvisionerError as error:
            is_late = isinstance(error, CommandTimeoutError) and not isinstance(error, NotStartedError)
            service = error.service if isinstance(error, NotUpError) else ""
            shortage = self.memory.since(role, begin if is_late else begin - BEFORE_LOSS_SECONDS, service)
            if is_late or isinstance(error, NotUpError):
                error.message = " ".join([error.message, *shortage])
                raise
            found = self._loss(error, role, shortage)
            with self._lock:
                loss = self._losses.setdefault(role, found)
            raise _repeated(loss) from error

    def look_for_shortage(self, role: Role, connection: Connection, timeout_seconds: float = MEMORY_SECONDS) -> None:
        """Looks whether a machine is out of memory, as far as it says so, and notes what is new as warnings, too."""
        with contextlib.suppress(ProvisionerError, ValueError, OSError):
            new = self.memory.look(role, connection, self.environment.machines[role].size.memory_gib, timeout_seconds)
            self.notes += new
            with self._warnings_lock:
                if new and len(warned := self.environment.setup.warnings) < MOST_WARNINGS:
                    setup = self.environment.setup.model_copy(update={"warnings": (*warned, *new)})
                    self._environment = self.session.environments.update(self.environment, setup=setup)

    def look_last(self) -> None:
        """Looks for what the end is to tell, in the machines that answer. No failure of it stops the destruction."""
        end = time.monotonic() + LAST_LOOK_SECONDS
        for role, connection in list(self._connections.items()):
            left = end - time.monotonic()
            if left > 0 and connection.active and role not in self._losses:
                with contextlib.suppress(Exception):
                    self.look_for_shortage(role, connection, left)

    def _loss(self, error: ProvisionerError, role: Role, shortage: Sequence[str]) -> LossError:
        """Returns what the loss of a machine means for the sample, by what the cloud says.

        Args:
            shortage: sentences on its memory; if there are none, its console may say something.
        """
        said, is_agents_doing = "", False
        with contextlib.suppress(ProvisionerError):
            # Machines without a family have no score of ours, which alone tells an agent's doing from an error. No
            # agent brings about what the cloud or this host failed to do, such as to admit this controller.
            agent_began = bool(self.configuration.family) and isinstance(error, MachineLostError | TaskError)
            environment = self.session.environments.last_known(self.environment)  # it may have been extended
            loss = outcomes.find_cause(self.session, environment, agent_began=agent_began)
            is_agents_doing = loss.cause == "agent"
            if loss.words.endswith("."):
                said = loss.words
            else:
                confirmed = f"The cloud confirms the loss: {loss.words}."
                said = confirmed if loss.words else "The cloud says that the machines run."
            shortage = shortage or [on_console(self.session.cloud.console(environment, role))]
        words = " ".join(filter(None, (error.message, said, *shortage)))
        return LossError(words, is_agents_doing=is_agents_doing)

    @property
    def losses(self) -> list[str]:
        """Says why machines refuse every call."""
        with self._lock:
            return [self.session.redactor.redact(loss.message) for loss in self._losses.values()]

    def begin_agent(self) -> None:
        """Records that an agent begins: what is lost from here on may be its doing. Safe to repeat.

        Raises:
            UsageError: the environment was destroyed in the meantime.
        """
        if self.environment.agent_at is None:
            with environment_lock(self.session, self.environment) as current:
                self._environment = self.session.environments.update(current, agent_at=now())

    def score(self, submission: str | None) -> tuple[Environment, ScoreResult]:
        """Scores the task at its end. What was started as the agent is ended before.

        Raises:
            AgentError: an agent left the machine so that it cannot be scored.
            SubmissionError: the agent's submission cannot be read.
            MachineLostError: the machine was lost, and no agent is to blame.
        """
        self.begin_agent()  # in an eval of the operator's own, nothing else has recorded it
        # Inspect has a submission for every sample, even if the family scores something else and the model gave none.
        is_scored = self.environment.has_score and not self.environment.has_aggregate_scores
        given = submission if is_scored else None
        self._environment, result = lifecycle.score(self.session, self.environment, given)
        return self._environment, result

    def intermediate_score(self) -> IntermediateScore:
        """Scores the task before its end.

        Raises:
            LossError: the machine does not answer now. Later calls may still reach it.
            TaskError: the family's scoring failed.
        """
        begin = time.monotonic()
        try:
            self._environment, result = lifecycle.intermediate_score(self.session, self.environment)
        except MachineLostError as error:
            shortage = self.memory.since("primary", begin - BEFORE_LOSS_SECONDS)
            raise self._loss(error, "primary", shortage) from error
        return result

    def leave(self) -> str:
        """Leaves the machines to the operator until their time to live ends, and returns the environment's id."""
        self._close()
        self._environment = lifecycle.leave(self.session, self.environment)
        return self._environment.id

    def destroy(self) -> Ending | None:
        """Destroys the machines, if there are any. Safe to repeat; depends on nothing in them.

        Returns:
            how they ended; None if there are none.

        Raises:
            StillThereError: something could not be removed.
        """
        self._close()
        environment = self._environment or self.failed
        if not environment:
            return None
        with self._shield():
            phases = lifecycle.destroy(self.session, environment)
        self._environment = None
        return Ending(environment.id, phases)

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
            connections = list(self._connections.values())
            self._connections.clear()
        for connection in connections:
            connection.close()


def _repeated(loss: LossError) -> LossError:
    """Returns the error anew: several calls, in threads of their own, may raise it at once."""
    return LossError(loss.message, is_agents_doing=loss.is_agents_doing)
