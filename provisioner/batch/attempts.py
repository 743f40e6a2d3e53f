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
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

from provisioner.batch.results import Outcome
from provisioner.batch.steps import (
    AgentStep,
    Costs,
    EndStep,
    Failure,
    ScoreStep,
    Step,
    UpStep,
    cut,
    interruption,
    judge,
    said,
)
from provisioner.batch.suite import Run, Suite
from provisioner.clock import now
from provisioner.clouds import Found
from provisioner.environment import lifecycle, operations
from provisioner.errors import (
    BudgetError,
    InfrastructureError,
    Interrupted,
    MachineLostError,
    ProvisionerError,
    SubmissionError,
    UsageError,
)
from provisioner.family.loader import TaskFamily
from provisioner.machines import reservations
from provisioner.machines.logs import keep_journals
from provisioner.models import Destination, Environment, Role
from provisioner.session import Phases, Session
from provisioner.store.environments import derived_id
from provisioner.store.files import write_atomically
from provisioner.ttl import TEARDOWN

BUDGET_SECONDS = 1.0
# A cloud that does not let something go now may do so in a moment.
DESTROY_PAUSES = (5.0, 20.0)
LEDGER_PAUSES = (2.0, 10.0, 30.0)
# Terraform outlives its controller, and ends what it has begun: stacks took three minutes where they took long, and the
# AWS provider gives an instance ten (its documentation, aws_instance, Timeouts).
CREATION = timedelta(minutes=10)


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
                self._clear(came_up=False)
                return UpStep(at=now(), begun_at=begun_at, failure=interruption(why), **facts)
            environment = known if known and known.status == "ready" else self._launch(known)
            reservations.attend(self.session, environment)
        except Interrupted:
            raise
        except Exception as error:
            return UpStep(at=now(), begun_at=begun_at, failure=self._judge_up(error), **facts)
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
                return AgentStep(at=now(), failure=interruption("its agent was cut short"))
            environment = self.session.environments.update(environment, agent_at=now())
            limit = self.suite.limits.agent_limit
            with phases.phase("agent"):
                try:
                    done = operations.run_agent(
                        self.session, environment, self.directory / agent.directory, agent.command, limit
                    )
                except TimeoutError:
                    return AgentStep(at=now(), timed_out=True)
            return AgentStep(at=now(), exit_code=done.exit_code)

        return self._in_environment("agent", AgentStep, work, task_failure="agent_failed")

    def score(self, agent_ended_at: datetime) -> ScoreStep:
        """Scores what the agent has left, or the submission.

        Args:
            agent_ended_at: what was scored later was scored by this step, before it was cut short.
        """
        submission = next((one.text for one in self.suite.submissions if one.name == self.run.agent), None)

        def work(environment: Environment, phases: Phases) -> ScoreStep:
            earlier = tuple(entry for entry in environment.score_log if entry.scored_at <= agent_ended_at)
            if len(earlier) < len(environment.score_log):
                environment = self.session.environments.update(environment, score_log=earlier)
            with phases.phase("score"):
                _, result = lifecycle.score(self.session, environment, submission)
            message = "" if result.kind == "scored" else f"{result.kind}: {result.message}".removesuffix(": ")
            failure = Failure(outcome="task_failed", message=cut(message)) if result.failed else None
            return ScoreStep(at=now(), failure=failure, score=result.score, message=cut(message))

        return self._in_environment("score", ScoreStep, work, task_failure="task_failed")

    def end(self, *, came_up: bool = False) -> EndStep:
        """Fetches the logs and ends the environment, until the cloud says that it is gone.

        Args:
            came_up: whether the attempt's `up` went well.
        """
        phases = Phases(self.session.progress)
        trouble = ""
        with self.session.shield():
            for pause in (*DESTROY_PAUSES, None):
                try:
                    self._end(phases, came_up=came_up)
                    trouble = ""
                    break
                except Exception as error:  # whatever it is, the machines are still to go
                    trouble = said(error)
                    if pause is not None:
                        time.sleep(pause)
        return EndStep(at=now(), phases=tuple(phases.finished), trouble=trouble)

    def _end(self, phases: Phases, *, came_up: bool) -> None:
        environment = self._record()
        if environment is None:
            self._clear(came_up=came_up)
            return
        if environment.started_at:
            with phases.phase("logs"):
                keep_journals(self.session, environment)
        lifecycle.destroy(self.session, environment, phases)

    def _record(self) -> Environment | None:
        """The environment's record, if this home has it and it lives."""
        store = self.session.environments
        try:
            return store.find(self.id) if (store.directory(self.id) / "environment.json").exists() else None
        except UsageError:  # destroyed in this moment
            return None

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

    def _alive(self, record: Environment) -> dict[Role, bool]:
        known = record.endpoints
        return {role: role in known and self.session.cloud.alive(record, role) for role in record.machines}

    def _entry(self) -> bool:
        """Whether something under this id was launched before, by whoever shares the ledger."""
        return bool(self.session.ledger.entries(environment=self.id))

    def _launch(self, known: Environment | None) -> Environment:
        phases = Phases(self.session.progress)
        while True:
            # Asked before and after: the last of them may settle in between.
            others = self._others_hold()
            try:
                if not phases.finished:  # which takes builders' holds, where it builds
                    with phases.phase("images"):
                        planned = lifecycle.plan(self.session, self.family, self.run.task, self.allowed)
                if known:
                    return lifecycle.adopt(self.session, planned, known, phases)
                return lifecycle.launch(self.session, planned, self.id, phases, self.create)
            except BudgetError:
                for earlier in range(1, self.number):  # what this run itself may still hold
                    with contextlib.suppress(InfrastructureError):  # the next look tries again
                        self._settle_orphan(replace(self, number=earlier).id, wait=False)
                # What others hold may be more than what they will have cost.
                if not others and not self._others_hold():
                    raise
                self.session.progress.phase_started("waiting for the budget")
                self._pause(BUDGET_SECONDS)

    def costs(self, environments: list[str]) -> Costs:
        """What the run's environments have cost, by the ledger: their holds, where they are not settled."""
        trouble = ""
        for pause in (*LEDGER_PAUSES, None):
            try:
                for name in environments:
                    self._settle_orphan(name, wait=True)
                entries = [entry for name in environments for entry in self.session.ledger.entries(environment=name)]
                return Costs(at=now(), micro_usd=sum(entry.counted_micro_usd for entry in entries))
            except Interrupted:
                raise
            except ProvisionerError as error:  # the score is not lost for it
                trouble = said(error)
                if pause is not None:
                    self._pause(pause)
        return Costs(at=now(), trouble=trouble)

    def _settle_orphan(self, name: str, *, wait: bool) -> None:
        """Settles what another home was still creating when its controller died, once surely nothing more comes.

        Args:
            wait: until then; else it is left alone.
        """
        if self.session.environments.directory(name).exists():
            return  # it would not go, and its end has said so
        for held in self.session.ledger.entries(unsettled=True, environment=name):
            left = (held.launched_at + CREATION - now()).total_seconds()
            if left > 0 and not wait:
                continue
            self.session.progress.phase_started("waiting for what a dead worker may have begun")
            self._pause(left)
            self.session.cloud.clear(Found(environment=name, things=(), region=held.region))
            self.session.ledger.settle_late(name, now())

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

    def _clear(self, *, came_up: bool) -> None:
        """Removes what the attempt has left, here or, where another home made it, in the cloud.

        Args:
            came_up: it had been created; else that home's Terraform may have outlived its controller and still be
                making more. The hold then stays until `costs` has looked again.
        """
        with self.session.shield():
            if record := self._record():
                lifecycle.destroy(self.session, record)
                return
            for held in self.session.ledger.entries(unsettled=True, environment=self.id):
                complete = self.session.cloud.clear(Found(environment=self.id, things=(), region=held.region))
                # A ledger of this home alone: it would have a record of what was created.
                own = not self.session.database
                if own or came_up or complete or held.launched_at + CREATION <= now():
                    self.session.ledger.settle_late(self.id, now())

    def _in_environment(
        self, name: str, kind: type[S], work: Callable[[Environment, Phases], S], task_failure: Outcome
    ) -> S:
        """Does a step in the environment, and keeps what it came to beside the logs: a crash may come right after."""
        try:
            environment = self._record()
            if environment is None:
                return kind(at=now(), failure=interruption("its environment is gone"))
            # A resumed run's own process looks after it from now on.
            reservations.attend(self.session, environment)
            kept = self.session.environments.logs(self.id) / f"step-{name}.json"
            if kept.exists():
                return kind.model_validate(json.loads(kept.read_text()))
        except (ProvisionerError, OSError, ValueError) as error:
            return kind(at=now(), failure=judge(error))
        phases = Phases(self.session.progress)
        try:
            done = work(environment, phases)
        except Interrupted:
            raise
        except SubmissionError as error:
            done = kind(at=now(), failure=Failure(outcome="agent_failed", message=cut(error.message)))
        except MachineLostError as error:
            done = kind(at=now(), failure=self._judge_loss(environment, error, name))
        except Exception as error:
            done = kind(at=now(), failure=judge(error, task_failure))
        done = done.model_copy(update={"phases": tuple(phases.finished)})
        with contextlib.suppress(OSError):
            write_atomically(kept, done.model_dump_json())
        return done

    def _judge_up(self, error: Exception) -> Failure:
        """A machine that is lost while it comes up: by its limit, if start() did not end."""
        expired = False
        with contextlib.suppress(ProvisionerError):
            expired = any(entry.expires_at <= now() for entry in self.session.ledger.entries(environment=self.id))
        if expired and isinstance(error, MachineLostError):
            return Failure(outcome="task_failed", message="start() did not end within the environment's time limit.")
        return judge(error)

    def _judge_loss(self, environment: Environment, error: MachineLostError, step: str) -> Failure:
        """Asks the cloud before a lost connection is believed to be a lost machine."""
        if environment.expires_at <= now():
            message = "The environment's time limit ended it."
            return Failure(outcome="timed_out" if step == "agent" else "task_failed", message=message)
        try:
            gone = {
                role: self.session.cloud.ending(environment, role)
                for role, alive in self._alive(environment).items()
                if not alive
            }
        except ProvisionerError as unasked:
            why = f"{error.message} The cloud could not be asked: {unasked.message}"
            return Failure(outcome="infrastructure_failed", message=cut(why), retry=True)
        words = ", ".join(
            f"{role} machine ({why.words})" if why.words else f"{role} machine" for role, why in gone.items()
        )
        if step == "agent" and any(why.by_itself for why in gone.values()):
            # No fault of the cloud's: another machine would be a second chance for the agent.
            message = cut(f"Switched off from within while the agent worked: {words}.")
            return Failure(outcome="agent_failed", message=message)
        state = f"The cloud says that it is gone: {words}." if gone else "Its machines run."
        return Failure(outcome="infrastructure_failed", message=cut(f"{error.message} {state}"), retry=True)


def _machine_types(environment: Environment) -> dict[str, str]:
    """What the cloud gave: it may have had to be dearer than the cheapest."""
    return {
        role: environment.placement.get(role) or machine.size.types[0]
        for role, machine in environment.machines.items()
        if machine.size.types
    }
