"""One attempt at a run, as steps that are safe to repeat: after a crash, each finds out what it did before.

Each attempt has an environment id of its own, derived from batch, run and attempt number. What exists under that id
tells a step what happened before a crash: nothing, or machines to continue with, or something that cannot be continued.
The last is removed, and the workflow makes a new attempt. An agent is started only once in each environment; it does
not notice that its controller has crashed, and is followed by the next.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from provisioner.base import signals, strict_json
from provisioner.base.clock import TEARDOWN, now
from provisioner.base.errors import (
    AgentError,
    BudgetError,
    DamagedRecordError,
    InfrastructureError,
    Interrupted,
    MachineLostError,
    ProvisionerError,
    SubmissionError,
    UsageError,
)
from provisioner.base.models import Destination, Environment
from provisioner.base.progress import best_effort
from provisioner.batch.results import LoggedScore, Outcome, bounded
from provisioner.batch.steps import (
    AgentStep,
    Costs,
    EndStep,
    Failure,
    ScoreStep,
    Step,
    UpStep,
    classify,
    classify_launch_error,
    classify_loss,
    classify_work_error,
    describe,
    interruption,
    truncate,
)
from provisioner.batch.suite import Run, Suite, environment_id
from provisioner.clouds.cloud import EnvironmentResources
from provisioner.environment import agent as environment_agent
from provisioner.environment import lifecycle, planning
from provisioner.environment.selection import destroy_damaged
from provisioner.family.loader import TaskFamily
from provisioner.machines import claims
from provisioner.machines.claims import destruction_lock, environment_lock
from provisioner.machines.destroy import marked
from provisioner.machines.launch import Create
from provisioner.machines.recordings import keep_journals, write_log
from provisioner.session import Phases, Session

# Each attempt has an environment of its own, in which this names its agent.
AGENT_IDENTITY = "batch"
BUDGET_POLL_SECONDS = 1.0
# A cloud that fails to delete something may succeed a moment later.
DESTROY_PAUSES = (5.0, 20.0)
LEDGER_PAUSES = (2.0, 10.0, 30.0)
# How long Terraform may keep creating after its controller has died. Slow stacks took three minutes, and the AWS
# provider gives an instance ten (its documentation, aws_instance, Timeouts).
MAX_CREATION = timedelta(minutes=10)

S = TypeVar("S", bound=Step)


def costs(session: Session, environments: list[str]) -> Costs:
    """Adds up what a run's environments have cost by the ledger: reserved sums, where they are not settled."""
    message = ""
    for pause in (*LEDGER_PAUSES, None):
        try:
            for name in environments:
                settle_orphan(session, name, wait=True)
            entries = [entry for name in environments for entry in session.ledger.entries(environment=name)]
            return Costs(at=now(), micro_usd=sum(entry.counted_micro_usd for entry in entries))
        except Interrupted:
            raise
        except ProvisionerError as error:  # no reason to lose the score
            message = describe(error)
            if pause is not None:
                signals.wait(pause, session.check)
    return Costs(at=now(), cost_error=message)


def settle_orphan(session: Session, name: str, *, wait: bool) -> None:
    """Removes and settles an environment of a dead controller, once its Terraform certainly creates no more.

    Args:
        name: the environment's id.
        wait: whether to wait until then; else it is left for later.
    """
    if session.environments.directory(name).exists():
        return  # its destruction failed, and its end step says so
    for entry in session.ledger.entries(unsettled=True, environment=name):
        # Not longer if the clock was set back.
        seconds = min(MAX_CREATION, MAX_CREATION - (now() - entry.launched_at)).total_seconds()
        if seconds > 0 and not wait:
            continue
        session.progress.phase_started("waiting for what a dead worker may have begun")
        signals.wait(seconds, session.check)
        session.cloud.delete_resources(EnvironmentResources(environment=name, region=entry.region))
        session.ledger.settle_late(name, now())


def others_have_reservations(session: Session, batch: str, environment: str) -> bool:
    """Whether a batch's other environments, that have not expired, have part of the budget reserved.

    Args:
        environment: the id of the one that is no other.
    """
    return any(
        entry.environment != environment and entry.expires_at > now() - TEARDOWN
        for entry in session.ledger.entries(unsettled=True, batch=batch)
    )


@dataclass(frozen=True)
class Attempt:
    """One attempt at a run.

    Args:
        session: of this run alone: its progress and `check` are the run's.
        batch: the batch's id.
        directory: the suite file's directory.
        allowed: what an environment without internet may reach.
        number: from 1.
        create: creates the machines of a recorded environment.
    """

    session: Session
    batch: str
    suite: Suite
    directory: Path
    run: Run
    family: TaskFamily
    allowed: tuple[Destination, ...]
    number: int
    create: Create

    @property
    def id(self) -> str:
        """The environment's id, the same in every process that works on this attempt."""
        return environment_id(self.batch, self.run.key, self.run.task, self.number)

    def up(self) -> UpStep:
        """Brings the environment up, or continues with the one that an earlier process brought up."""
        begun_at = now()
        facts = {"environment": self.id, "cloud": self.session.cloud.name, "region": self.session.cloud.region}
        try:
            existing, reason = self._existing_environment()
            if reason:
                with self.session.shield():
                    self._remove(came_up=False)
                return UpStep(at=now(), begun_at=begun_at, failure=interruption(reason), **facts)
            environment = existing if existing and existing.status == "ready" else self._launch(existing)
            claims.take_lease(self.session, environment)
        except Interrupted:
            raise
        except Exception as error:
            return UpStep(
                at=now(), begun_at=begun_at, failure=classify_launch_error(self.session, self.id, error), **facts
            )
        return UpStep(
            at=now(),
            begun_at=environment.created_at,
            phases=environment.phases,
            machine_types=_machine_types(environment),
            images={role: machine.image for role, machine in environment.machines.items()},
            warnings=environment.setup.warnings,
            **facts,
        )

    def agent(self) -> AgentStep:
        """Runs the agent until it ends or its time is up; does nothing if a submission stands in for it.

        An agent that an earlier process has started works on in its machine, and is followed.
        """
        agent = next((agent for agent in self.suite.agents if agent.name == self.run.agent), None)
        if agent is None:
            return AgentStep(at=now())

        def work(environment: Environment, phases: Phases) -> AgentStep:
            limit = self.suite.limits.agent_limit
            work = environment_agent.AgentCommand(
                self.directory / agent.directory, agent.command, limit, AGENT_IDENTITY
            )
            with phases.phase("agent"):
                ended = environment_agent.run_agent(self.session, environment, work)
            return AgentStep(at=now(), exit_code=ended.exit_code, timed_out=ended.timed_out, unknown_end=ended.problem)

        return self._in_environment("agent", AgentStep, work, task_outcome="agent_failed")

    def score(self, agent_ended_at: datetime) -> ScoreStep:
        """Scores the agent's work, or the submission.

        Args:
            agent_ended_at: scores that were logged later come from this step, before it was interrupted, and are
                dropped.
        """
        submission = next((entry.text for entry in self.suite.submissions if entry.name == self.run.agent), None)

        def work(environment: Environment, phases: Phases) -> ScoreStep:
            with environment_lock(self.session, environment) as environment:
                earlier = tuple(entry for entry in environment.score_log if entry.scored_at <= agent_ended_at)
                if len(earlier) < len(environment.score_log):
                    environment = self.session.environments.update(environment, score_log=earlier)
            with phases.phase("score"):
                _, result = lifecycle.score(self.session, environment, submission)
            message = "" if result.kind == "scored" else f"{result.kind}: {result.message}".removesuffix(": ")
            # What an agent leaves behind may take the memory that scoring needs.
            by_agent = result.kind == "killed" and environment.agent_at is not None
            outcome: Outcome = "agent_failed" if by_agent else "task_failed"
            failure = Failure(outcome=outcome, message=truncate(message)) if result.failed else None
            return ScoreStep(at=now(), failure=failure, score=result.score, message=truncate(message))

        return self._in_environment("score", ScoreStep, work, task_outcome="task_failed")

    def end(self, *, came_up: bool = False) -> EndStep:
        """Fetches the logs and destroys the environment, until the cloud confirms that it is gone.

        Args:
            came_up: whether the attempt's `up` succeeded.
        """
        phases = Phases(self.session.progress)
        message = ""
        with self.session.shield():
            score_log, entries = self._score_log()
            for pause in (*DESTROY_PAUSES, None):
                try:
                    self._remove(came_up=came_up, phases=phases)
                    message = ""
                    break
                except Exception as error:  # whatever it is, the machines still have to go
                    message = describe(error)
                    if pause is not None:
                        time.sleep(pause)
            sealed = self._sealed()
        done = tuple(phases.finished)
        return EndStep(
            at=now(), phases=done, removal_error=message, score_log=score_log, score_log_entries=entries, **sealed
        )

    def _sealed(self) -> dict[str, Any]:
        """Returns what its last record says; nothing if that cannot be read."""
        with best_effort(self.session.progress, f"Reading the record of {self.id}"):
            if record := self.session.environments.record(self.id):
                images = {role: machine.image for role, machine in record.machines.items()}
                facts = record.model_dump(include={"recording", "family_version", "agent_files"})
                return {**facts, "images": images}
        return {}

    def _score_log(self) -> tuple[tuple[LoggedScore, ...], int | None]:
        """Returns the bounded score log and how many entries the whole log has, even if the environment is gone."""
        with best_effort(self.session.progress, f"Keeping the score log of {self.id}"):
            record = self.session.environments.record(self.id)
            return (bounded(record.score_log), len(record.score_log)) if record else ((), 0)
        return (), None

    def _record(self) -> Environment | None:
        """Returns the environment's record, which may be damaged; None if it is destroyed, or was never here."""
        store = self.session.environments
        try:
            return store.find(self.id) if store.exists(self.id) else None
        except UsageError:  # destroyed in this moment
            return None

    def _existing_environment(self) -> tuple[Environment | None, str]:
        """Returns what an earlier process brought up, or None; and why what exists cannot be continued."""
        try:
            record = self._record()
        except DamagedRecordError:
            return None, "its record cannot be read"
        if record is None:
            was_launched = self.session.ledger.entries(environment=self.id)  # by any controller that shares the ledger
            return None, "it was interrupted while it came up" if was_launched else ""
        if record.agent_at or record.status not in ("creating", "ready"):
            return None, "it was interrupted"
        alive = self.session.cloud.alive
        if not all(role in record.endpoints and alive(record, role) for role in record.machines):
            return None, "its machines are gone" if record.endpoints else "it was interrupted while it was created"
        if record.status == "creating" and record.probes:
            return None, "it was interrupted during start()"
        return record, ""

    def _launch(self, existing: Environment | None) -> Environment:
        """Creates the environment, or completes an existing one; waits while other runs have the budget reserved."""
        phases = Phases(self.session.progress)
        while True:
            # Asked before and after: the last other reservation may be settled in between.
            others = others_have_reservations(self.session, self.batch, self.id)
            try:
                if not phases.finished:  # building an image reserves a builder's cost
                    with phases.phase("images"):
                        planned = planning.plan(self.session, self.family, self.run.task, self.allowed)
                if existing:
                    return lifecycle.take_over(self.session, planned, existing, phases)
                return lifecycle.launch(self.session, planned, self.id, phases, self.create)
            except BudgetError as error:
                if not error.may_fit_later:
                    raise
                self._settle_earlier_attempts()
                # Others may have reserved more than they will have spent.
                if not others and not others_have_reservations(self.session, self.batch, self.id):
                    raise
                self.session.progress.phase_started("waiting for the budget")
                signals.wait(BUDGET_POLL_SECONDS, self.session.check)

    def _settle_earlier_attempts(self) -> None:
        """Settles what this run's own earlier attempts may still have reserved, if that is possible by now."""
        for number in range(1, self.number):
            with contextlib.suppress(InfrastructureError):  # the next refusal tries again
                settle_orphan(self.session, replace(self, number=number).id, wait=False)

    def costs(self, environments: list[str]) -> Costs:
        """Adds up what the run's environments have cost by the ledger: reserved sums, where they are not settled."""
        return costs(self.session, environments)

    def pause(self, seconds: float) -> Step:
        """Waits before the next attempt."""
        self.session.progress.phase_started("waiting to try again")
        signals.wait(seconds, self.session.check)
        return Step(at=now())

    def _remove(self, *, came_up: bool, phases: Phases | None = None) -> None:
        """Removes whatever the attempt created: by this home's record, or from the cloud if another home created it.

        Args:
            came_up: whether all of it had been created. If not, the other home's Terraform may have outlived its
                controller and still be creating. The reservation then stays until `costs` has looked again.
            phases: of the attempt's end, which keeps the journals first; None if it is not the end.
        """
        try:
            environment = self._record()
        except DamagedRecordError:
            destroy_damaged(self.session, self.id)
            return
        if environment:
            if phases and environment.started_at:
                # Should this process die before the end, no other continues what it has stopped.
                with destruction_lock(self.session, environment) as environment:
                    marked(self.session, environment, "destroying")
                with phases.phase("logs"):
                    keep_journals(self.session, environment)
            lifecycle.destroy(self.session, environment, phases)
            return
        for entry in self.session.ledger.entries(unsettled=True, environment=self.id):
            complete = self.session.cloud.delete_resources(
                EnvironmentResources(environment=self.id, region=entry.region)
            )
            # If only this home uses the ledger, there would be a record of anything that was created.
            private = not self.session.database
            if private or came_up or complete or entry.launched_at <= now() - MAX_CREATION:
                self.session.ledger.settle_late(self.id, now())
        self.session.environments.forget(self.id)  # a process killed while it archived leaves a part of it

    def _in_environment(
        self, name: str, kind: type[S], work: Callable[[Environment, Phases], S], task_outcome: Outcome
    ) -> S:
        """Does a step's work in the environment, and keeps its result beside the logs in case of a crash."""
        environment: Environment | None = None
        try:
            environment = self._record()
            if environment is None:
                return kind(at=now(), failure=interruption("its environment is gone"))
            # If the run was resumed, this process looks after the environment from now on.
            claims.take_lease(self.session, environment)
            path = self.session.environments.logs(self.id) / f"step-{name}.json"
            if path.exists():
                return strict_json.load_file(kind, path)
        except (ProvisionerError, OSError, ValueError) as error:
            return kind(at=now(), failure=classify(error, agent_began=self._agent_began(environment)))
        phases = Phases(self.session.progress)
        try:
            result = work(environment, phases)
        except Interrupted:
            # What it stopped, such as an agent, has not ended by itself. Should it die now, the next process knows.
            stopped = kind(at=now(), failure=interruption("it was stopped"))
            with contextlib.suppress(OSError):
                write_log(path, stopped.model_dump_json())
            raise
        except Exception as error:
            result = kind(at=now(), failure=self._failure_of(error, environment, name, task_outcome))
        result = result.model_copy(update={"phases": tuple(phases.finished)})
        with contextlib.suppress(OSError):
            write_log(path, result.model_dump_json())
        return result

    def _failure_of(self, error: Exception, environment: Environment, step: str, task_outcome: Outcome) -> Failure:
        """Classifies an error of work in the environment, which others may have destroyed meanwhile."""
        if isinstance(error, SubmissionError):
            return Failure(outcome="agent_failed", message=truncate(error.message))
        if reason := self._stop_reason(environment):
            return interruption(reason)
        if isinstance(error, AgentError):
            return Failure(outcome="agent_failed", message=truncate(error.message))
        began = self._agent_began(environment)
        if isinstance(error, MachineLostError):
            return classify_loss(self.session.environments.last_known(environment), error, step, agent_began=began)
        return classify_work_error(error, task_outcome, agent_began=began)

    def _stop_reason(self, known: Environment) -> str:
        """Returns why a step that failed counts as interrupted; empty if its environment is not being destroyed.

        Nor does it count if the environment's time was over: that alone ended it.
        """
        with contextlib.suppress(DamagedRecordError):
            newest = self.session.environments.record(self.id) or known  # it may have been extended, and archived
            if newest.expires_at <= now():
                return ""
            record = self._record()
            if record is None:
                return "its environment is gone"
            return "it was stopped" if record.is_ending else ""
        return ""

    def _agent_began(self, known: Environment | None) -> bool:
        """Whether an agent may have begun, by the newest record or the known one; True if it cannot be read."""
        try:
            record = self._record() or known
        except DamagedRecordError:
            return True
        return record is not None and record.agent_at is not None


def _machine_types(environment: Environment) -> dict[str, str]:
    """Returns the machine types by role: those that the cloud gave, or else the cheapest that fit."""
    return {
        role: environment.placement.get(role) or machine.size.types[0]
        for role, machine in environment.machines.items()
        if machine.size.types
    }
