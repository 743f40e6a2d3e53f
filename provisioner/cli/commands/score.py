"""The command `score`, and how the end of scoring is described."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from provisioner.base.errors import TaskError, UsageError
from provisioner.base.models import Environment, ScoreLogEntry
from provisioner.base.printable import beginning, first_and_last_lines
from provisioner.cli.options import (
    EnvFileOption,
    EnvironmentArgument,
    SubmissionFileOption,
    SubmissionOption,
    read_submission,
)
from provisioner.cli.output import Result, streams
from provisioner.cli.sessions import environment_session
from provisioner.environment import lifecycle
from provisioner.family.scores import ScoreResult
from provisioner.session import Session

# Of the message and of the details of an intermediate score; --json has all of them.
SHOWN_SCORE_CHARACTERS = 4000


def main(
    env: EnvironmentArgument,
    submission: SubmissionOption = None,
    submission_file: SubmissionFileOption = None,
    intermediate: Annotated[bool, typer.Option("--intermediate", help="Score once before the end.")] = False,
    env_file: EnvFileOption = None,
) -> Result:
    """Scores an environment."""
    answer = read_submission(submission, submission_file)
    if intermediate and answer is not None:
        raise UsageError("--intermediate scores the machine's current state and cannot be used with a submission.")
    opened, environment = environment_session(env, env_file)
    if intermediate:
        return _intermediate(opened, environment)
    environment, outcome = lifecycle.score(opened, environment, answer, readmit_agent=True)
    data = {
        "environment": environment.id,
        "status": outcome.kind,
        "score": outcome.score,
        "message": outcome.message,
        "score_log": [entry.model_dump(mode="json") for entry in environment.score_log],
        "warnings": list(environment.setup.warnings),
    }
    return Result(data, outcome_text(outcome, environment.setup.warnings), exit_code(outcome))


def _intermediate(opened: Session, environment: Environment) -> Result:
    environment, result = lifecycle.intermediate_score(opened, environment)
    entry = result.entry.model_dump(mode="json") if result.entry else None
    data = {
        "environment": environment.id,
        "entry": entry,
        "visible_to_agent": result.visible,
        **streams(result.stdout, result.stderr, result.stdout_size, result.stderr_size),
    }
    return Result(data, _entry_text(result.entry))


def _entry_text(entry: ScoreLogEntry | None) -> str:
    """Describes an intermediate score, with the beginnings of its message and details if it has any."""
    lines = ["no score" if entry is None or entry.score is None else f"score: {entry.score:g}"]
    for name, said in (("message", entry.message), ("details", entry.details)) if entry else ():
        if said:
            lines.append(f"{name}: {beginning(json.dumps(said, ensure_ascii=False), SHOWN_SCORE_CHARACTERS)}")
    return "\n".join(lines)


def outcome_text(outcome: ScoreResult, warnings: tuple[str, ...] = ()) -> str:
    """Describes how scoring ended, with what matters of a traceback, and what may spoil the result."""
    if outcome.score is not None:
        lines = [f"score: {outcome.score:g}"]
    else:
        lines = [f"no score: {outcome.kind}", outcome.message, first_and_last_lines(outcome.details, 4, 20)]
    return "\n".join(part for part in (*lines, *(f"warning: {warning}" for warning in warnings)) if part)


def exit_code(outcome: ScoreResult) -> int:
    """Returns the exit code of a command that scored."""
    return TaskError.exit_code if outcome.failed else 0
