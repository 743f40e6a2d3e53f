"""Runs a task from start to finish: brings up an environment, runs an agent, scores or tests, and destroys it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from provisioner.base.errors import ProvisionerError
from provisioner.base.models import Destination, Environment, Phase, ScoreLogEntry
from provisioner.base.progress import best_effort
from provisioner.environment import operations
from provisioner.environment.agent import AgentCommand, run_agent
from provisioner.environment.lifecycle import (
    bring_up,
    destroy,
    leave,
    open_driver,
    score,
)
from provisioner.family.loader import TaskFamily
from provisioner.family.scores import ScoreResult
from provisioner.machines.launch import kept_words, looked_after, record_breakdown, tell_of_destruction
from provisioner.session import Phases, Session


@dataclass(frozen=True)
class RunResult:
    """Holds the result of a whole run.

    Args:
        environment: the environment's id.
        family: the family's name.
        task: the task's name.
        outcome: the score, or the reason why there is none.
        agent_exit_code: the exit code of the agent's command; None if no agent ran.
        score_log: the intermediate scores.
        phases: the phases and their durations.
        recording: the hash of its sealed logs; empty while the environment is kept, or if they could not be sealed.
        warnings: what may spoil the result, such as a task that differs at each call of get_tasks.
    """

    environment: str
    family: str
    task: str
    outcome: ScoreResult
    agent_exit_code: int | None
    score_log: tuple[ScoreLogEntry, ...]
    phases: tuple[Phase, ...]
    recording: str = ""
    warnings: tuple[str, ...] = ()


@looked_after
def run(
    session: Session,
    family: TaskFamily,
    task: str,
    *,
    agent: AgentCommand | None = None,
    submission: str | None = None,
    allowed: tuple[Destination, ...] = (),
    keep: bool = False,
) -> RunResult:
    """Brings up an environment, runs the agent if there is one, scores, and destroys the environment.

    Args:
        agent: the agent that works on the task; its submission file is scored.
        submission: the text to score instead of running an agent.
        keep: leaves the environment up afterwards, whatever happens. If it did not come up, the session decides.

    Raises:
        ProvisionerError: provisioner, the host or start() failed. A failed scoring is a result, not an error.
    """
    phases = Phases(session.progress)
    environment = bring_up(session, family, task, allowed)
    phases.finished.extend(environment.phases)
    exit_code: int | None = None
    outcome: ScoreResult | None = None
    try:
        if agent:
            with phases.phase("agent"):
                ended = run_agent(session, environment, agent)
                exit_code = ended.exit_code
                if ended.problem:
                    session.progress.note(ended.problem)
        with phases.phase("score"):
            environment, outcome = score(session, environment, submission, readmit_agent=keep)
    except BaseException as error:
        _tell_of_failure(session, environment, error, keep=keep)
        raise
    finally:
        try:
            with session.shield():
                _end(session, environment, phases, keep=keep)
        except ProvisionerError:
            if outcome:
                score_words = outcome.kind if outcome.score is None else f"{outcome.score:g}"
                session.progress.note(f"The score of {environment.id}, taken before: {score_words}")
            raise
    recording = ""
    with best_effort(session.progress, f"Reading the seal of {environment.id}"):
        record = session.environments.record(environment.id)
        recording = record.recording if record else ""
    return RunResult(
        environment=environment.id,
        family=family.name,
        task=task,
        outcome=outcome,
        agent_exit_code=exit_code,
        score_log=environment.score_log,
        phases=tuple(phases.finished),
        recording=recording,
        warnings=environment.setup.warnings,
    )


@looked_after
def run_tests(
    session: Session,
    family: TaskFamily,
    task: str,
    arguments: Sequence[str],
    allowed: tuple[Destination, ...] = (),
    *,
    keep: bool = False,
) -> tuple[Environment, int]:
    """Runs the family's own pytest files in an environment.

    Args:
        arguments: arguments for pytest.
        keep: leaves the environment up afterwards.

    Returns:
        the environment's record and pytest's exit code.
    """
    phases = Phases(session.progress)
    environment = bring_up(session, family, task, allowed)
    try:
        with phases.phase("tests"), open_driver(session, environment) as driver:
            code = operations.run_tests(session, environment, driver, arguments)
    except BaseException as error:
        _tell_of_failure(session, environment, error, keep=keep)
        raise
    finally:
        with session.shield():
            environment = _end(session, environment, phases, keep=keep)
    return environment, code


def _tell_of_failure(session: Session, environment: Environment, error: BaseException, *, keep: bool) -> None:
    if keep:
        record_breakdown(session, environment, error)
    else:
        tell_of_destruction(session, environment, error)


def _end(session: Session, environment: Environment, phases: Phases, *, keep: bool) -> Environment:
    """Destroys an environment, or leaves it to the operator and says how to log in; returns its record."""
    if not keep:
        destroy(session, environment, phases)
        return environment
    environment = leave(session, environment)
    session.steady().progress.note(kept_words(environment))
    return environment
