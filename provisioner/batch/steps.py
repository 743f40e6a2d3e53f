"""What the steps of an attempt come to, and whose fault an error is. Pure."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from provisioner.batch.results import Outcome
from provisioner.errors import (
    BudgetError,
    CapacityError,
    ImageBuildError,
    InfrastructureError,
    IsolationError,
    ProvisionerError,
    TaskError,
)
from provisioner.models import Phase, Record

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


class Costs(Step):
    """What all attempts have cost, in millionths of a US dollar; or why that is not known."""

    micro_usd: int = 0
    trouble: str = ""


class EndStep(Step):
    """The environment is gone; or what would not go."""

    trouble: str = ""


def interruption(why: str) -> Failure:
    """Nothing failed: whoever worked on it was stopped. Pure."""
    return Failure(outcome="infrastructure_failed", message=f"Begun again: {why}.", interrupted=True)


def judge(error: Exception, task_failure: Outcome = "task_failed") -> Failure:
    """Whose fault an error is. Pure."""
    message = said(error)
    if not isinstance(error, ProvisionerError):
        return Failure(outcome="infrastructure_failed", message=message)
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


def said(error: Exception) -> str:
    """An error in words, bounded. Pure."""
    return cut(error.message if isinstance(error, ProvisionerError) else f"Unexpected {type(error).__name__}: {error}")


def cut(text: str) -> str:
    """What machines say is bounded before it is kept. Pure."""
    return text[:MESSAGE_CHARACTERS]
