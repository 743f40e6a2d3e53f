"""Runs the family's operations in a machine that is up: start, scoring, teardown and tests."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field, ValidationError

from provisioner.base import strict_json
from provisioner.base.clock import elapsed, now
from provisioner.base.errors import SubmissionError, TaskError, UsageError
from provisioner.base.models import Environment, Record, ScoreLogEntry
from provisioner.base.printable import printable
from provisioner.base.progress import best_effort
from provisioner.driver.task_driver import Answer, TaskDriver
from provisioner.family.env_file import select_required
from provisioner.family.scores import ScoreResult, classify_score, parse_intermediate, visible_message, was_killed
from provisioner.machines.create import aux_user
from provisioner.machines.recordings import write_log
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from provisioner.ssh.exchange import NO_OUTPUT, StreamSize

SUBMISSION = "/home/agent/submission.txt"
SUBMISSION_LIMIT_BYTES = 8 << 20
# Where it is kept, in the environment's logs, and how much of it.
SUBMISSION_KEPT = "submission.txt"
KEPT_CHARACTERS = 1 << 20
# Our own operations. The first changes the owner of everything in the agent's home, which may be millions of files.
SETTLING_SECONDS = 1800.0
READING_SECONDS = 120.0
# The record must stay readable whatever the family's code put into its score log.
SCORE_LOG_BYTES = 4 << 20
SCORE_LOG_VALUES = 400_000
# Beside the directory of results: the helper wants one that it made itself, and after a reboot there is none.
GIVEN = "/run/provisioner-given"


class _Submission(Record):
    """What the helper says about the submission file: its text if it was found, else perhaps why it cannot be one."""

    found: bool = Field(default=False, strict=True)
    text: str | None = None
    reason: str = ""


class _KilledError(TaskError):
    """The kernel killed the family's scoring, as when memory is short."""


class _LogIsFullError(TaskError):
    """The score log has no room for another score. An agent that asks for scores can fill it."""


class _Tests(Record):
    """What the helper says about the family's tests. A process ends with 255 at most, or by a signal."""

    exit_code: int = Field(strict=True, ge=-255, le=255)


def driver(session: Session, environment: Environment, connection: Connection) -> TaskDriver:
    """Returns the task driver of an environment's primary machine."""
    logs = session.environments.logs(environment.id)
    return TaskDriver(connection, environment.family, session.redactor, session.output, logs)


def vm_variables(session: Session, environment: Environment) -> dict[str, str]:
    """Returns the variables that we supply to a task with an aux VM (Task Standard, VM_*); none without one."""
    if "aux" not in environment.machines:
        return {}
    return {
        "VM_SSH_USERNAME": aux_user(environment.machines["aux"].distribution),
        "VM_SSH_PRIVATE_KEY": session.environments.key(environment.id, "task").private,
        "VM_IP_ADDRESS": environment.endpoints["aux"].private_address or "",
    }


def task_variables(session: Session, environment: Environment) -> dict[str, str]:
    """Returns the variables for the family's code: those that the task requires and no others.

    Raises:
        MissingVariablesError: required variables are not set.
    """
    names = environment.setup.required_environment_variables
    return select_required(session.variables, names, vm_variables(session, environment))


def _call(
    session: Session,
    environment: Environment,
    driver: TaskDriver,
    operation: str,
    limit_seconds: float,
    **request: str,
) -> Answer:
    """Runs an operation of the family's code, with the variables that the task requires and no others."""
    variables = task_variables(session, environment)
    return driver.call(
        operation, task=environment.task, environment=variables, timeout_seconds=limit_seconds, **request
    )


def start(session: Session, environment: Environment, driver: TaskDriver, *, skip_chown: bool) -> None:
    """Runs start(), gives the agent its home, and places the instructions.

    Raises:
        TaskError: start() failed or did not end in time.
    """
    _call(session, environment, driver, "start", environment.time_limits.start_seconds).value("start()")
    settled = driver.call(
        "settle_home",
        instructions=environment.setup.instructions,
        skip_chown=skip_chown,
        timeout_seconds=SETTLING_SECONDS,
    )
    settled.value("giving the agent its home")


def teardown(session: Session, environment: Environment, driver: TaskDriver) -> None:
    """Runs the family's teardown.

    Raises:
        TaskError: teardown failed or did not end in time.
        MissingVariablesError: required variables are not set.
    """
    _call(session, environment, driver, "teardown", environment.time_limits.teardown_seconds).value("teardown()")


def run_tests(session: Session, environment: Environment, driver: TaskDriver, arguments: Sequence[str]) -> int:
    """Runs the family's own pytest files, with all variables (Task Standard, tests).

    Returns:
        pytest's exit code.

    Raises:
        TaskError: pytest could not be run, did not end in time, or its exit code cannot be read.
    """
    variables = {**session.variables, **vm_variables(session, environment)}
    answer = driver.call(
        "pytest",
        task=environment.task,
        environment=variables,
        arguments=list(arguments),
        timeout_seconds=environment.time_limits.tests_seconds,
    )
    try:
        return _Tests.model_validate(answer.value("pytest")).exit_code
    except ValidationError as error:
        raise TaskError("pytest's exit code cannot be read: the machine gave no such result.") from error


def read_submission(driver: TaskDriver) -> str | None:
    """Returns the agent's submission unchanged, or None if there is none.

    Raises:
        SubmissionError: the submission is not a regular file, is too large, or the machine does not say what it is, or
            has no memory to read it.
        TaskError: it was not read in time.
    """
    answer = driver.call(
        "read_submission", path=SUBMISSION, limit_bytes=SUBMISSION_LIMIT_BYTES, timeout_seconds=READING_SECONDS
    )
    try:
        value = answer.value("reading the submission")
    except TaskError as error:
        if was_killed(answer.result):
            raise SubmissionError(f"The submission cannot be read: {error.message}.", details=error.details) from error
        raise
    try:
        read = _Submission.model_validate(value)
    except ValidationError as error:
        raise SubmissionError("The submission cannot be read: the machine gave no valid answer.") from error
    if read.reason:
        raise SubmissionError(f"The submission file cannot be read: {printable(read.reason[:200])}")
    if read.found and read.text is None:
        raise SubmissionError("The submission cannot be read: the machine found one and did not send it.")
    return read.text if read.found else None


def end_score(
    session: Session, environment: Environment, driver: TaskDriver, submission: str | None
) -> tuple[Environment, ScoreResult]:
    """Scores at the end by score(), or by a last intermediate score and aggregate_scores().

    Args:
        submission: the text to score instead of the submission file.
    """
    if submission is not None and (environment.has_aggregate_scores or not environment.has_score):
        scored_by = "is scored by aggregate_scores()" if environment.has_aggregate_scores else "has no score()"
        session.progress.note(f"The submission is not used: the family {scored_by}.")
    if environment.has_intermediate_score:
        environment, killed = _last_intermediate_score(session, environment, driver)
        if killed:
            return environment, killed
    if environment.has_aggregate_scores:
        return environment, _aggregate(session, environment, driver)
    if not environment.has_score:
        return environment, ScoreResult(kind="not_scored", message="The family has neither score nor aggregate_scores.")
    if submission is None:
        submission = read_submission(driver)
    _keep_submission(session, environment, submission)
    path = f"{GIVEN}-{secrets.token_hex(16)}.submission"
    driver.put_file(path, (submission or "").encode())
    answer = _call(session, environment, driver, "score", environment.time_limits.score_seconds, submission=path)
    return environment, classify_score(answer.result)


def _last_intermediate_score(
    session: Session, environment: Environment, driver: TaskDriver
) -> tuple[Environment, ScoreResult | None]:
    """Scores a last time before the end; returns a result if the kernel killed that and nothing else counts."""
    decides = environment.has_aggregate_scores or not environment.has_score
    try:
        return intermediate_score(session, environment, driver)[0], None
    except _LogIsFullError as error:
        session.progress.note(error.message)  # the scores in it count
    except TaskError as error:
        if decides and isinstance(error, _KilledError):
            return environment, ScoreResult(kind="killed", message=error.message)
        if decides:
            raise
        session.progress.note(error.message)  # score() alone decides
    return environment, None


def _keep_submission(session: Session, environment: Environment, submission: str | None) -> None:
    """Keeps what is scored beside the logs, without secrets, and its beginning alone if it is long."""
    if submission is not None:
        with best_effort(session.progress, f"Keeping the submission of {environment.id}"):
            text = session.redactor.redact(submission)[:KEPT_CHARACTERS].encode("utf-8", "replace")
            write_log(session.environments.live_logs(environment.id) / SUBMISSION_KEPT, text)


def _aggregate(session: Session, environment: Environment, driver: TaskDriver) -> ScoreResult:
    path = f"{GIVEN}-{secrets.token_hex(16)}.score-log"
    scores = [entry for entry in environment.score_log if entry.score is not None]  # families compute with them
    driver.put_file(path, _score_log(scores))
    limit = environment.time_limits.aggregate_scores_seconds
    answer = _call(session, environment, driver, "aggregate_scores", limit, score_log=path)
    return classify_score(answer.result)


def _score_log(entries: Sequence[ScoreLogEntry]) -> bytes:
    # NaN stays NaN.
    return json.dumps([entry.model_dump(mode="json") | {"score": entry.score} for entry in entries]).encode()


@dataclass(frozen=True)
class IntermediateScore:
    """One intermediate score, with the part of it that the agent may see.

    Args:
        entry: its entry in the score log; None if the family gave no score.
        visible: message, and the score unless the manifest hides it; never the details.
        stdout, stderr: the scorer's output, which the agent may see.
        stdout_size, stderr_size: how much the scorer wrote, and how much of it was cut out.
    """

    entry: ScoreLogEntry | None
    visible: dict[str, object]
    stdout: str
    stderr: str
    stdout_size: StreamSize = NO_OUTPUT
    stderr_size: StreamSize = NO_OUTPUT


def intermediate_score(
    session: Session, environment: Environment, driver: TaskDriver
) -> tuple[Environment, IntermediateScore]:
    """Scores once before the end and appends the result to the record's score log.

    Raises:
        TaskError: intermediate_score() failed or returned an invalid result.
        UsageError: the family has no intermediate_score.
    """
    if not environment.has_intermediate_score:
        raise UsageError(f"{environment.family} has no intermediate_score.")
    limit = environment.time_limits.intermediate_score_seconds
    answer = _call(session, environment, driver, "intermediate_score", limit)
    parsed = parse_intermediate(answer.result)
    entry = None
    if parsed.is_logged:
        entry = _logged(environment, parsed.score, parsed.message, parsed.details)
        environment = session.environments.update(environment, score_log=_extended(environment.score_log, entry))
    elif parsed.failed:
        kind = _KilledError if parsed.kind == "killed" else TaskError
        raise kind(f"intermediate_score() failed: {parsed.failure}", details=answer.tail(answer.result))
    visible = visible_message(parsed.score, parsed.message, environment.score_visible_to_agent)
    return environment, IntermediateScore(
        entry, visible, answer.stdout, answer.stderr, answer.stdout_size, answer.stderr_size
    )


def first_score(session: Session, environment: Environment, driver: TaskDriver) -> Environment:
    """Scores before the agent begins. If the family's code fails, a note and a failed entry say so: the agent runs.

    Returns:
        the record with its score log.
    """
    try:
        return intermediate_score(session, environment, driver)[0]
    except TaskError as error:
        session.progress.note(f"The first score failed, and the agent runs nevertheless: {error.message}")
        entry = _logged(environment, None, {}, {"failure": error.message})
        return session.environments.update(environment, score_log=(*environment.score_log, entry))


def _logged(
    environment: Environment, score: float | None, message: dict[str, Any], details: dict[str, Any]
) -> ScoreLogEntry:
    """Returns an entry of the score log, of now."""
    seconds = elapsed(environment.started_at or environment.created_at, now()).total_seconds()
    return ScoreLogEntry(score=score, message=message, details=details, scored_at=now(), elapsed_seconds=seconds)


def _extended(log: tuple[ScoreLogEntry, ...], entry: ScoreLogEntry) -> tuple[ScoreLogEntry, ...]:
    """Returns a score log with one more entry, unless it would become too large."""
    longer = (*log, entry)
    try:
        strict_json.parse(
            _score_log(longer), limit_bytes=SCORE_LOG_BYTES, maximum_values=SCORE_LOG_VALUES, constants=True
        )
    except strict_json.NotStrictJsonError as error:
        raise _LogIsFullError(
            f"The score log is full: {error}.", hint="Return shorter messages and details from intermediate_score()."
        ) from error
    return longer
