"""Which step follows which: attempts, retries, interruptions, and the row that a run comes to."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from provisioner.base.models import Phase
from provisioner.batch.results import LoggedScore, Row
from provisioner.batch.steps import AgentStep, Costs, EndStep, Failure, ScoreStep, Step, UpStep
from provisioner.batch.workflow import CAPACITY_PAUSE_SECONDS, MAX_ATTEMPTS, run_workflow
from tests.unit.batch.samples import AT, run

LOST = Failure(outcome="infrastructure_failed", message="gone", retry=True)
FULL = Failure(outcome="infrastructure_failed", message="no room", retry=True, capacity=True)
BUSY = Failure(outcome="infrastructure_failed", message="throttled", retry=True, throttled=True)
CUT = Failure(outcome="infrastructure_failed", message="cut short", interrupted=True)
WRONG = Failure(outcome="task_failed", message="start() failed")


class Script:
    """An attempt whose steps come to what they are told to. Notes what was done."""

    def __init__(self, done: list[str], number: int, shortages: int, failure: Failure | None, **steps: Any) -> None:
        self._done, self._number, self._failure, self._steps = done, number, failure, steps
        done.append(f"attempt {number}/{shortages}")

    def up(self) -> UpStep:
        begun_at = AT + timedelta(seconds=10 * self._number)
        return UpStep(
            at=AT, begun_at=begun_at, environment=f"env-{self._number}", cloud="local", region="",
            failure=self._failure, phases=(Phase(name="boot", seconds=2),), **self._steps.get("up", {}),
        )  # fmt: skip

    def agent(self) -> AgentStep:
        return AgentStep(at=AT, **self._steps.get("agent", {"exit_code": 0}))

    def score(self, agent_ended_at: datetime) -> ScoreStep:
        assert agent_ended_at == AT
        return ScoreStep(at=AT, **self._steps.get("score", {"score": 1.0}))

    def end(self, *, came_up: bool) -> EndStep:
        assert came_up == (self._failure is None)
        return EndStep(at=AT, **self._steps.get("end", {}))

    def costs(self, environments: list[str]) -> Costs:
        return Costs(at=AT, micro_usd=10 * len(environments), **self._steps.get("costs", {}))

    def pause(self, seconds: float) -> Step:
        self._done.append(f"pause {seconds:g}")
        return Step(at=AT)


def completed(*failures: Failure | None, retries: int = 2, **steps: Any) -> tuple[Row, list[str]]:
    """A run whose attempts fail, one after the other, as told; the last one's fate repeats."""
    done: list[str] = []

    def do(name: str, kind: type[Step], work: Callable[[], Step]) -> Step:
        done.append(name)
        return work()

    def attempt(number: int, shortages: int) -> Any:
        return Script(done, number, shortages, failures[min(number, len(failures)) - 1], **steps)

    row = run_workflow(run(), retries, attempt, do, "1.2.3")
    return row, done


def test_a_run_that_goes_well_is_one_attempt_in_order() -> None:
    row, done = completed(None)
    assert done == ["attempt 1/0", "up", "agent", "score", "end", "costs"]
    assert (row.outcome, row.score, row.attempts, row.cost_micro_usd, row.version) == ("scored", 1.0, 1, 10, "1.2.3")
    assert row.phases == (Phase(name="boot", seconds=2),)


def test_the_row_has_what_the_last_attempt_says() -> None:
    logged = LoggedScore(score=0.5, elapsed_seconds=7, scored_at=AT)
    row, _ = completed(
        None, up={"warnings": ("It differs.",)}, end={"score_log": (logged,), "recording": "a" * 64}
    )  # fmt: skip
    assert (row.warnings, row.score_log, row.recording) == (("It differs.",), (logged,), "a" * 64)


def test_infrastructure_gets_a_fresh_machine_within_bounds() -> None:
    row, done = completed(LOST, None)
    assert (row.outcome, row.attempts, row.environment, row.cost_micro_usd) == ("scored", 2, "env-2", 20)
    assert "pause 2" in done
    # Each attempt is ended, whatever it came to.
    assert done.count("end") == 2
    row, done = completed(LOST)
    assert (row.outcome, row.message, row.attempts) == ("infrastructure_failed", "gone", 3)
    assert row.retried == ("gone", "gone")
    assert completed(LOST, retries=0)[0].attempts == 1


def test_earlier_attempts_are_one_phase_with_its_reason() -> None:
    row, _ = completed(LOST, FULL, None)
    assert row.retried == ("gone", "no room")
    assert row.phases == (Phase(name="earlier attempts", seconds=20), Phase(name="boot", seconds=2))


def test_where_there_is_no_room_the_next_place_is_tried_later() -> None:
    _, done = completed(FULL, FULL, None)
    assert [word for word in done if word.startswith(("attempt", "pause "))] == [
        "attempt 1/0", "pause 30", "attempt 2/1", "pause 30", "attempt 3/2",
    ]  # fmt: skip


def test_interruptions_are_no_failures_but_are_bounded() -> None:
    row, done = completed(CUT, CUT, CUT, CUT, None, retries=0)
    assert (row.outcome, row.attempts) == ("scored", 5)
    assert "pause 2" not in done
    assert completed(CUT)[0].attempts == MAX_ATTEMPTS


@pytest.mark.parametrize(
    ("failure", "steps", "outcome", "score", "message"),
    [
        (WRONG, {}, "task_failed", None, "start() failed"),
        (Failure(outcome="over_budget", message="too dear"), {}, "over_budget", None, "too dear"),
        (None, {"agent": {"exit_code": 3}}, "agent_failed", 1.0, "The agent ended with exit code 3."),
        (None, {"agent": {"unknown_end": "The cause is unknown."}}, "agent_failed", 1.0, "The cause is unknown."),
        (None, {"agent": {"timed_out": True}}, "timed_out", 1.0, "The agent did not end in time."),
        (None, {"score": {"failure": WRONG}}, "task_failed", None, "start() failed"),
        (
            None, {"score": {"message": "manual_scoring_required"}}, "scored", None, "manual_scoring_required",
        ),
        (
            None, {"end": {"removal_error": "i-1 is there"}}, "scored", 1.0,
            "env-1 is not confirmed to be gone: i-1 is there",
        ),
        (None, {"costs": {"cost_error": "no ledger"}}, "scored", 1.0, "Its cost is not known: no ledger"),
    ],
)  # fmt: skip
def test_whose_fault_it_was_is_told_apart(
    failure: Failure | None, steps: dict[str, Any], outcome: str, score: float | None, message: str
) -> None:
    row, done = completed(failure, **steps)
    assert (row.outcome, row.score, row.message, row.attempts) == (outcome, score, message, 1)
    assert "end" in done


def test_throttling_uses_up_no_retry() -> None:
    row, done = completed(BUSY, BUSY, BUSY, None, retries=0)
    assert (row.outcome, row.attempts) == ("scored", 4)
    assert done.count(f"pause {CAPACITY_PAUSE_SECONDS:g}") == 3
    row, _ = completed(BUSY, LOST, BUSY, LOST, None, retries=1)
    assert (row.outcome, row.attempts) == ("infrastructure_failed", 4)


def test_throttling_without_end_ends_a_run() -> None:
    row, _ = completed(BUSY, retries=0)
    assert (row.outcome, row.attempts) == ("infrastructure_failed", MAX_ATTEMPTS)
