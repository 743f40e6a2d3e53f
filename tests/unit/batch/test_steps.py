"""Whose fault an error is, and whether a run is retried for it."""

from __future__ import annotations

import errno

import pytest

from provisioner.base.errors import (
    BudgetError,
    CapacityError,
    HostError,
    ImageBuildError,
    InfrastructureError,
    IsolationError,
    MachineLostError,
    TaskError,
    TerraformError,
    ThrottledError,
)
from provisioner.batch.steps import MESSAGE_CHARACTERS, classify, classify_work_error, describe


@pytest.mark.parametrize(
    ("error", "outcome", "retry", "capacity"),
    [
        (BudgetError("x"), "over_budget", False, False),
        (TaskError("x"), "task_failed", False, False),
        (ImageBuildError("x"), "task_failed", False, False),
        (CapacityError("x"), "infrastructure_failed", True, True),
        (MachineLostError("x"), "infrastructure_failed", True, False),
        (InfrastructureError("x"), "infrastructure_failed", True, False),
        (IsolationError("x"), "infrastructure_failed", False, False),
        (HostError("x"), "infrastructure_failed", False, False),
        (ZeroDivisionError("x"), "infrastructure_failed", False, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_an_error_has_a_cause_and_only_infrastructure_is_retried(
    error: Exception, outcome: str, retry: bool, capacity: bool
) -> None:
    failure = classify(error)
    assert (failure.outcome, failure.retry, failure.capacity) == (outcome, retry, capacity)
    assert not failure.interrupted


def test_a_failed_command_of_the_agent_is_the_agents_fault() -> None:
    assert classify(TaskError("x"), "agent_failed").outcome == "agent_failed"
    assert not classify(InfrastructureError("x"), agent_began=True).retry


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (AttributeError("x"), "agent_failed"),
        (MemoryError(), "agent_failed"),
        (ConnectionError("x"), "agent_failed"),
        (OSError(errno.ENOSPC, "No space left on device"), "infrastructure_failed"),
        (OSError(errno.EMFILE, "Too many open files"), "infrastructure_failed"),
        (HostError("x"), "infrastructure_failed"),
        (TaskError("x"), "task_failed"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_an_unexpected_error_is_the_agents_once_one_has_begun(error: Exception, outcome: str) -> None:
    failure = classify_work_error(error, "task_failed", agent_began=True)
    assert (failure.outcome, failure.retry) == (outcome, False)
    assert classify_work_error(error, "task_failed", agent_began=False) == classify(error, "task_failed")


def test_messages_are_bounded_and_name_unexpected_errors() -> None:
    assert describe(ZeroDivisionError("by zero")) == "Unexpected ZeroDivisionError: by zero"
    assert len(describe(TaskError("x" * 10_000))) == MESSAGE_CHARACTERS


@pytest.mark.parametrize("error", [ThrottledError("x"), TerraformError("x", throttled=True)], ids=["asked", "applied"])
def test_throttling_is_no_failure_unless_an_agent_has_begun(error: Exception) -> None:
    failure = classify(error)
    assert (failure.retry, failure.throttled) == (True, True)
    failure = classify(error, agent_began=True)
    assert (failure.retry, failure.throttled) == (False, False)
    assert not classify(TerraformError("x")).throttled
