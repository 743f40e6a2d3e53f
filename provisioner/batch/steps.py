"""Defines the results of an attempt's steps, and classifies errors by what the cloud or the host says."""

from __future__ import annotations

import contextlib
import errno
from datetime import datetime

from pydantic import Field

from provisioner.base.clock import now
from provisioner.base.errors import (
    BudgetError,
    CapacityError,
    ImageBuildError,
    InfrastructureError,
    IsolationError,
    MachineLostError,
    ProvisionerError,
    TaskError,
    TerraformError,
    ThrottledError,
)
from provisioner.base.models import Environment, Phase, Record
from provisioner.base.printable import beginning
from provisioner.batch.results import Outcome, ScoreLog
from provisioner.session import Session

MESSAGE_CHARACTERS = 500
# What the host says of its disk and of open files. What machines take of these is bounded: it is no agent's doing.
_HOST_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE})


class Failure(Record):
    """Why an attempt failed.

    Args:
        outcome: the run's outcome if it is not retried.
        retry: whether a fresh machine may do better.
        capacity: whether the cloud lacked capacity.
        throttled: whether the cloud asked for fewer requests, which says nothing about the run: it uses up no retry.
        interrupted: nothing failed, but the process that worked on the attempt was stopped or killed.
    """

    outcome: Outcome
    message: str
    retry: bool = False
    capacity: bool = False
    throttled: bool = False
    interrupted: bool = False


class Step(Record):
    """The result of a step.

    Args:
        at: when the step ended.
        failure: None if it succeeded.
        phases: the phases that it went through.
    """

    at: datetime
    failure: Failure | None = None
    phases: tuple[Phase, ...] = ()


class UpStep(Step):
    """The result of bringing the environment up.

    Args:
        begun_at: when the attempt began.
        environment: the environment's id.
        machine_types, images: by the machine's role.
        warnings: what may spoil the result.
    """

    begun_at: datetime
    environment: str
    cloud: str
    region: str
    machine_types: dict[str, str] = Field(default_factory=dict)
    images: dict[str, str] = Field(default_factory=dict)
    warnings: tuple[str, ...] = ()


class AgentStep(Step):
    """The result of running the agent.

    Args:
        exit_code: None if there was no agent, if it ran out of time, or if its end is not known.
        timed_out: whether it ran out of time.
        unknown_end: why it is not known how the agent ended; empty if that is known.
    """

    exit_code: int | None = None
    timed_out: bool = False
    unknown_end: str = ""


class ScoreStep(Step):
    """The result of scoring.

    Args:
        score: None without a number.
        message: what scoring said about it.
    """

    score: float | None = None
    message: str = ""


class Costs(Step):
    """What all attempts have cost.

    Args:
        micro_usd: in millionths of a US dollar.
        cost_error: why the cost is not known; empty if it is.
    """

    micro_usd: int = 0
    cost_error: str = ""


class EndStep(Step):
    """The result of destroying the environment.

    Args:
        removal_error: why the environment is not confirmed to be gone; empty if it is.
        score_log: the environment's intermediate scores.
        score_log_entries: how many there were, before score_log was bounded; None if it could not be read.
        recording: the hash of its sealed logs; empty if there is none.
        family_version, agent_files, images: as its last record says, which was sealed; empty if it cannot be read.
    """

    removal_error: str = ""
    score_log: ScoreLog = ()
    score_log_entries: int | None = Field(default=None, ge=0, le=2**53)
    recording: str = ""
    family_version: str = ""
    agent_files: str = ""
    images: dict[str, str] = Field(default_factory=dict)


def interruption(reason: str) -> Failure:
    """Returns the failure of an attempt whose process was stopped, where nothing else went wrong."""
    return Failure(outcome="infrastructure_failed", message=f"Started again: {reason}.", interrupted=True)


def classify(error: Exception, task_outcome: Outcome = "task_failed", *, agent_began: bool = False) -> Failure:
    """Decides what is to blame for an error, and whether a retry may help.

    Args:
        task_outcome: the outcome if a command failed that the task or the agent brought along.
        agent_began: whether an agent has begun, which must not get a second chance.
    """
    message = describe(error)
    if not isinstance(error, ProvisionerError):
        return Failure(outcome="infrastructure_failed", message=message)
    if isinstance(error, BudgetError):
        return Failure(outcome="over_budget", message=message)
    if isinstance(error, TaskError):
        return Failure(outcome=task_outcome, message=message)
    if isinstance(error, ImageBuildError):
        return Failure(outcome="task_failed", message=message)
    if isinstance(error, CapacityError):
        return Failure(outcome="infrastructure_failed", message=message, retry=True, capacity=True)
    throttled = isinstance(error, ThrottledError) or (isinstance(error, TerraformError) and error.throttled)
    retry = isinstance(error, InfrastructureError) and not isinstance(error, IsolationError) and not agent_began
    return Failure(outcome="infrastructure_failed", message=message, retry=retry, throttled=throttled and retry)


def classify_work_error(error: Exception, task_outcome: Outcome, *, agent_began: bool) -> Failure:
    """Classifies an error of work in a machine: an agent that has begun may have caused an unexpected one.

    Args:
        task_outcome, agent_began: as in `classify`.
    """
    failure = classify(error, task_outcome, agent_began=agent_began)
    of_host = isinstance(error, OSError) and error.errno in _HOST_ERRORS
    if agent_began and not isinstance(error, ProvisionerError) and not of_host:
        return Failure(outcome="agent_failed", message=failure.message)
    return failure


def describe(error: Exception) -> str:
    """Returns an error's message, truncated."""
    if isinstance(error, ProvisionerError):
        return truncate(error.message)
    return truncate(f"Unexpected {type(error).__name__}: {error}")


def truncate(text: str) -> str:
    """Returns at most the first 500 characters: machines and clouds may say more than a row should keep."""
    return beginning(text, MESSAGE_CHARACTERS)


def classify_launch_error(session: Session, environment_id: str, error: Exception) -> Failure:
    """Classifies an error of a launch. A machine that is lost because its ttl has passed means that start() hung."""
    if isinstance(error, MachineLostError):
        with contextlib.suppress(ProvisionerError):
            if any(entry.expires_at <= now() for entry in session.ledger.entries(environment=environment_id)):
                return Failure(outcome="task_failed", message="start() did not end within the environment's ttl.")
    return classify(error)


def classify_loss(environment: Environment, error: MachineLostError, step: str, *, agent_began: bool) -> Failure:
    """Classifies the loss of a machine for which the agent is not to blame.

    Args:
        environment: its last known record.
        error: says what the cloud says.
        step: the name of the step that lost it.
        agent_began: whether an agent has begun, which must not get a second chance.
    """
    if environment.expires_at <= now():
        message = "The environment's ttl ended it."
        return Failure(outcome="timed_out" if step == "agent" else "task_failed", message=message)
    # An agent that has begun gets a fresh machine only if the cloud confirms the loss.
    retry = bool(error.cloud_words) or not agent_began
    return Failure(outcome="infrastructure_failed", message=truncate(error.message), retry=retry)
