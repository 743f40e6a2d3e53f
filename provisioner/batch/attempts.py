"""One attempt at a run: its steps, each of which may be begun again after a crash and then finds what was done.

An environment id belongs to each attempt. What a step finds under it says what happened before: nothing; machines to
go on with; or something that nobody can go on with, which is removed, and a new attempt is made. An agent begins once
in each environment.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from pydantic import Field

from provisioner import holds, inside, lifecycle, machines
from provisioner.batch.results import Outcome
from provisioner.batch.suite import Run, Suite
from provisioner.clouds import Found
from provisioner.environments import derived_id
from provisioner.errors import (
    BudgetError,
    CapacityError,
    ImageBuildError,
    InfrastructureError,
    Interrupted,
    IsolationError,
    MachineLostError,
    ProvisionerError,
    TaskError,
)
from provisioner.image_store import now
from provisioner.limits import TEARDOWN, parse_duration
from provisioner.models import Destination, Environment, Phase, Record
from provisioner.paths import write_atomically
from provisioner.session import Phases, Session
from provisioner.task_family import TaskFamily

BUDGET_SECONDS = 1.0
# A cloud that does not let something go now may do so in a moment.
DESTROY_PAUSES = (5.0, 20.0)
MESSAGE_CHARACTERS = 500


class Failure(Record):
    """Why an attempt came to nothing.

    Args:
        outcome: the run's, if it is not tried again.
        retry: whether a fresh machine may do better.
        capacity: whether the cloud had none to give.
        interrupted: nothing failed; whoever worked on it was stopped or killed.
    """

    outcome: Outcome
    message: str
    retry: bool = False
    capacity: bool = False
    interrupted: bool = False


class Step(Record):
    """What a step came to.

    Args:
        at: when it ended.
        failure: None if it went well.
        phases: those that it went through.
    """

    at: datetime
    failure: Failure | None = None
    phases: tuple[Phase, ...] = ()


class UpStep(Step):
    """The environment is up.

    Args:
        begun_at: when the attempt began.
        machine_types, images: by role.
    """

    begun_at: datetime
    environment: str
    cloud: str
    region: str
    machine_types: dict[str, str] = Field(default_factory=dict)
    images: dict[str, str] = Field(default_factory=dict)


class AgentStep(Step):
    """The agent has ended. exit_code is None where there was none, or it ran out of time."""

    exit_code: int | None = None
    timed_out: bool = False


class ScoreStep(Step):
    """The score, if there is one, and what scoring said."""

    score: float | None = None
    message: str = ""


class EndStep(Step):
    """The environment is gone; or what would not go."""

    trouble: str = ""


S = TypeVar("S", bound=Step)


@dataclass(frozen=True)
class Attempt:
    """One attempt.

    Args:
        session: of this run alone: its progress and `check` are the run's.
        batch: the batch's id.
        directory: the suite file's.
        number: from 1.
        create: makes the machines of a recorded environment.
    """

    session: Session
    batch: str
    suite: Suite
    directory: Path
    run: Run
    family: TaskFamily
    allowed: tuple[Destination, ...]
    number: int
    create: lifecycle.Create

    @property
    def id(self) -> str:
        """The environment's id, the same whoever makes it."""
        return derived_id(self.family.name, self.run.task, f"{self.batch}/{self.run.key}/{self.number}")

    def up(self) -> UpStep:
        """Brings the environment up; adopts one that is."""
        begun_at = now()
        facts = {"environment": self.id, "cloud": self.session.cloud.name, "region": self.session.cloud.region}
        try:
            known, why = self._found()
            if why:
                self._clear()
                return UpStep(at=now(), begun_at=begun_at, failure=_interruption(why), **facts)
            environment = known if known and known.status == "ready" else self._launch(known)
            holds.attend(self.session, environment)
        except Interrupted:
            raise
        except Exception as error:
            return UpStep(at=now(), begun_at=begun_at, failure=_judge(error), **facts)
        return UpStep(
            at=now(),
            begun_at=environment.created_at,
            phases=environment.phases,
            machine_types=_machine_types(environment),
            images={role: machine.image for role, machine in environment.machines.items()},
            **facts,
        )

    def agent(self) -> AgentStep:
        """Lets the agent work, to its limit at the most; does nothing for a submission."""
        agent = next((one for one in self.suite.agents if one.name == self.run.agent), None)
        if agent is None:
            return AgentStep(at=now())

        def work(environment: Environment, phases: Phases) -> AgentStep:
            if environment.agent_at:
                return AgentStep(at=now(), failure=_interruption("its agent was cut short"))
            environment = self.session.environments.update(environment, agent_at=now())
            limit = parse_duration(self.suite.limits.agent)
            with phases.phase("agent"):
                try:
                    done = inside.run_agent(
                        self.session, environment, self.directory / agent.directory, agent.command, limit
                    )
                except TimeoutError:
                    return AgentStep(at=now(), timed_out=True)
            return AgentStep(at=now(), exit_code=done.exit_code)

        return self._in_environment("agent", AgentStep, work, task_failure="agent_failed")

    def score(self) -> ScoreStep:
        """Scores what the agent has left, or the submission."""
        submission = next((one.text for one in self.suite.submissions if one.name == self.run.agent), None)

        def work(environment: Environment, phases: Phases) -> ScoreStep:
            with phases.phase("score"):
                _, result = lifecycle.score(self.session, environment, submission)
            message = "" if result.kind == "scored" else f"{result.kind}: {result.message}".removesuffix(": ")
            failure = Failure(outcome="task_failed", message=_cut(message)) if result.failed else None
            return ScoreStep(at=now(), failure=failure, score=result.score, message=_cut(message))

        return self._in_environment("score", ScoreStep, work, task_failure="task_failed")

    def end(self) -> EndStep:
        """Fetches the logs and ends the environment, until the cloud says that it is gone."""
        phases = Phases(self.session.progress)
        trouble = ""
        with self.session.shield():
            for pause in (*DESTROY_PAUSES, None):
                try:
                    self._end(phases)
                    trouble = ""
                    break
                except ProvisionerError as error:
                    trouble = _cut(error.message)
                    if pause is not None:
                        time.sleep(pause)
        return EndStep(at=now(), phases=tuple(phases.finished), trouble=trouble)

    def _end(self, phases: Phases) -> None:
        environment = self._record()
        if environment is None:
            self._clear()
            return
        if environment.started_at:
            with phases.phase("logs"):
                machines.keep_journals(self.session, environment)
        lifecycle.destroy(self.session, environment, phases)

    def _record(self) -> Environment | None:
        """The environment's record, if this home has it and it lives."""
        store = self.session.environments
        return store.find(self.id) if (store.directory(self.id) / "environment.json").exists() else None

    def _found(self) -> tuple[Environment | None, str]:
        """What this attempt has left behind when it was worked on before, and why nobody can go on with it."""
        record = self._record()
        if record is None:
            return None, "it was stopped while it came up" if self._entry() else ""
        if record.agent_at or record.status not in ("creating", "ready"):
            return None, "it was stopped"
        if not all(self._alive(record).values()):
            return None, "its machines are gone" if record.endpoints else "it was stopped while it was created"
        if record.status == "creating" and record.probes:
            return None, "it was stopped during start()"
        return record, ""

    def _alive(self, record: Environment) -> dict[str, bool]:
        known = record.endpoints
        return {role: role in known and self.session.cloud.alive(record, role) for role in record.machines}

    def _entry(self) -> bool:
        """Whether something under this id was launched before, by whoever shares the ledger."""
        return bool(self.session.ledger.entries(environment=self.id))

    def _launch(self, known: Environment | None) -> Environment:
        while True:
            phases = Phases(self.session.progress)
            try:
                with phases.phase("images"):
                    planned = lifecycle.plan(self.session, self.family, self.run.task, self.allowed)
                if known:
                    return lifecycle.adopt(self.session, planned, known, phases)
                return lifecycle.launch(self.session, planned, self.id, phases, self.create)
            except BudgetError:
                # What others hold may be more than what they will have cost.
                if not self._others_hold():
                    raise
                self.session.progress.phase_started("waiting for the budget")
                self._pause(BUDGET_SECONDS)

    def _others_hold(self) -> bool:
        return any(
            entry.environment != self.id and entry.expires_at + TEARDOWN > now()
            for entry in self.session.ledger.entries(unsettled=True, batch=self.batch)
        )

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.session.check()
            time.sleep(0.1)

    def pause(self, seconds: float) -> Step:
        """Waits before another attempt."""
        self.session.progress.phase_started("waiting to try again")
        self._pause(seconds)
        return Step(at=now())

    def _clear(self) -> None:
        """Removes what the attempt has left, here or, where another home made it, in the cloud."""
        with self.session.shield():
            if record := self._record():
                lifecycle.destroy(self.session, record)
                return
            if held := self.session.ledger.entries(unsettled=True, environment=self.id):
                self.session.cloud.clear(Found(environment=self.id, things=(), region=held[0].region))
                self.session.ledger.settle_late(self.id, now())

    def _in_environment(
        self, name: str, kind: type[S], work: Callable[[Environment, Phases], S], task_failure: Outcome
    ) -> S:
        """Does a step in the environment, and keeps what it came to beside the logs: a crash may come right after."""
        environment = self._record()
        if environment is None:
            return kind(at=now(), failure=_interruption("its environment is gone"))
        kept = self.session.environments.logs(self.id) / f"step-{name}.json"
        if kept.exists():
            return kind.model_validate(json.loads(kept.read_text()))
        phases = Phases(self.session.progress)
        try:
            done = work(environment, phases)
        except Interrupted:
            raise
        except MachineLostError as error:
            done = kind(at=now(), failure=self._judge_loss(environment, error, name))
        except Exception as error:
            done = kind(at=now(), failure=_judge(error, task_failure))
        done = done.model_copy(update={"phases": tuple(phases.finished)})
        with contextlib.suppress(OSError):
            write_atomically(kept, done.model_dump_json())
        return done

    def _judge_loss(self, environment: Environment, error: MachineLostError, step: str) -> Failure:
        """Asks the cloud before a lost connection is believed to be a lost machine."""
        if environment.expires_at <= now():
            message = "The environment's time limit ended it."
            return Failure(outcome="timed_out" if step == "agent" else "task_failed", message=message)
        try:
            gone = [role for role, alive in self._alive(environment).items() if not alive]
        except ProvisionerError as unasked:
            why = f"{error.message} The cloud could not be asked: {unasked.message}"
            return Failure(outcome="infrastructure_failed", message=_cut(why), retry=True)
        said = f"The cloud says that it is gone: {', '.join(gone)} machine." if gone else "Its machines run."
        return Failure(outcome="infrastructure_failed", message=_cut(f"{error.message} {said}"), retry=True)


def _interruption(why: str) -> Failure:
    return Failure(outcome="infrastructure_failed", message=f"Begun again: {why}.", interrupted=True)


def _judge(error: Exception, task_failure: Outcome = "task_failed") -> Failure:
    """Whose fault an error is. Pure."""
    if not isinstance(error, ProvisionerError):
        return Failure(outcome="infrastructure_failed", message=_cut(f"Unexpected {type(error).__name__}: {error}"))
    message = _cut(error.message)
    if isinstance(error, BudgetError):
        return Failure(outcome="over_budget", message=message)
    if isinstance(error, TaskError):
        return Failure(outcome=task_failure, message=message)
    if isinstance(error, ImageBuildError):
        return Failure(outcome="task_failed", message=message)
    if isinstance(error, CapacityError):
        return Failure(outcome="infrastructure_failed", message=message, retry=True, capacity=True)
    retry = isinstance(error, InfrastructureError) and not isinstance(error, IsolationError)
    return Failure(outcome="infrastructure_failed", message=message, retry=retry)


def _machine_types(environment: Environment) -> dict[str, str]:
    """What the cloud gave: it may have had to be dearer than the cheapest."""
    return {
        role: environment.placement.get(role) or machine.size.types[0]
        for role, machine in environment.machines.items()
        if machine.size.types
    }


def _cut(text: str) -> str:
    return text[:MESSAGE_CHARACTERS]
