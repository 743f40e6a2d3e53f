"""Runs a task from start to finish: brings up an environment, runs an agent, scores or tests, and destroys it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from provisioner.environment import operations
from provisioner.environment.agent import Agent, run_agent
from provisioner.environment.lifecycle import bring_up, destroy, leave, open_driver, score, tell_of_destruction
from provisioner.family.loader import TaskFamily
from provisioner.family.scores import ScoreResult
from provisioner.models import Destination, Environment, Phase, ScoreLogEntry
from provisioner.session import Phases, Session


@dataclass(frozen=True)
class AgentCommand:
    """Names an agent: its directory on the controller and the command that starts it in the machine."""

    directory: Path
    command: str


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
    """

    environment: str
    family: str
    task: str
    outcome: ScoreResult
    agent_exit_code: int | None
    score_log: tuple[ScoreLogEntry, ...]
    phases: tuple[Phase, ...]


def run(
    session: Session,
    family: TaskFamily,
    task: str,
    *,
    agent: AgentCommand | None = None,
    submission: str | None = None,
    allowed: tuple[Destination, ...] = (),
) -> RunResult:
    """Brings up an environment, runs the agent if there is one, scores, and always destroys the environment.

    Args:
        agent: the agent that works on the task; its submission file is scored.
        submission: the text to score instead of running an agent.

    Raises:
        ProvisionerError: provisioner, the host or start() failed. A failed scoring is a result, not an error.
    """
    phases = Phases(session.progress)
    environment = bring_up(session, family, task, allowed)
    phases.finished.extend(environment.phases)
    exit_code: int | None = None
    try:
        if agent:
            with phases.phase("agent"):
                ended = run_agent(session, environment, Agent(agent.directory, agent.command))
                exit_code = ended.exit_code
                if ended.problem:
                    session.progress.note(ended.problem)
        with phases.phase("score"):
            environment, outcome = score(session, environment, submission)
    except BaseException as error:
        tell_of_destruction(session, environment, error)
        raise
    finally:
        with session.shield():
            destroy(session, environment, phases)
    return RunResult(
        environment=environment.id,
        family=family.name,
        task=task,
        outcome=outcome,
        agent_exit_code=exit_code,
        score_log=environment.score_log,
        phases=tuple(phases.finished),
    )


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
        if not keep:
            tell_of_destruction(session, environment, error)
        raise
    finally:
        if keep:
            environment = leave(session, environment)
        else:
            with session.shield():
                destroy(session, environment, phases)
    return environment, code
