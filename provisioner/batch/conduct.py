"""A run from its first attempt to its row: which step follows which. Decides; the steps do.

The same answers of the steps lead to the same decisions: after a crash it is begun again, and steps that had ended give
what they gave before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from provisioner.batch.attempts import AgentStep, Attempt, EndStep, Failure, ScoreStep, Step, UpStep
from provisioner.batch.results import Outcome, Row
from provisioner.batch.suite import Run
from provisioner.models import Record

# Interruptions do not count as retries; somebody who interrupts for ever has to give up at some time.
MOST_ATTEMPTS = 30
PAUSE_SECONDS = 2.0
# Others give back what they have only when they end.
CAPACITY_PAUSE_SECONDS = 30.0

S = TypeVar("S", bound=Step)
Do = Callable[[str, type[S], Callable[[], S]], S]


class Costs(Step):
    """What all attempts have cost, in millionths of a US dollar."""

    micro_usd: int = 0


class Life(Record):
    """What one attempt came to."""

    up: UpStep
    agent: AgentStep | None = None
    score: ScoreStep | None = None
    end: EndStep

    @property
    def failure(self) -> Failure | None:
        """The first thing that went wrong."""
        return next((step.failure for step in (self.up, self.agent, self.score) if step and step.failure), None)


def live(attempt: Attempt, do: Do[Step]) -> Life:
    """One attempt, to the proof that its environment is gone."""
    up = _done(do, "up", UpStep, attempt.up)
    agent = None if up.failure else _done(do, "agent", AgentStep, attempt.agent)
    score = _done(do, "score", ScoreStep, attempt.score) if agent and not agent.failure else None
    end = _done(do, "end", EndStep, attempt.end)
    return Life(up=up, agent=agent, score=score, end=end)


def conduct(
    run: Run,
    retries: int,
    attempt_of: Callable[[int, int], Attempt],
    costs_of: Callable[[list[str]], Costs],
    do: Do[Step],
    version: str,
) -> Row:
    """All attempts at a run.

    Args:
        retries: how often infrastructure may fail.
        attempt_of: the attempt with a number, after so many failures for want of capacity.
        costs_of: what environments have cost.
        do: does a step, or gives what it gave before.
        version: of provisioner.
    """
    lives: list[Life] = []
    shortages = 0
    while True:
        attempt = attempt_of(len(lives) + 1, shortages)
        lives.append(live(attempt, do))
        failure = lives[-1].failure
        if not failure or len(lives) == MOST_ATTEMPTS:
            break
        if not failure.interrupted:
            if not failure.retry or retries == 0:
                break
            retries -= 1
            shortages += failure.capacity
            seconds = CAPACITY_PAUSE_SECONDS if failure.capacity else PAUSE_SECONDS
            _done(do, "pause", Step, lambda attempt=attempt, seconds=seconds: attempt.pause(seconds))  # type: ignore[misc]
    costs = _done(do, "costs", Costs, lambda: costs_of([one.up.environment for one in lives]))
    return row_of(run, lives, costs.micro_usd, version)


def _done(do: Do[Step], name: str, kind: type[S], work: Callable[[], S]) -> S:
    done = do(name, kind, work)
    assert isinstance(done, kind)
    return done


def row_of(run: Run, lives: list[Life], micro_usd: int, version: str) -> Row:
    """The row of a run. Pure."""
    last = lives[-1]
    outcome, message = _outcome(last)
    if last.end.trouble:
        message = f"{message} Not confirmed to be gone: {last.end.trouble}".strip()
    steps = [step for step in (last.up, last.agent, last.score, last.end) if step]
    return Row(
        key=run.key,
        family=run.key.split("/")[0],
        task=run.task,
        agent=run.agent,
        repetition=run.repetition,
        outcome=outcome,
        score=last.score.score if last.score else None,
        message=message,
        agent_exit_code=last.agent.exit_code if last.agent else None,
        attempts=len(lives),
        environment=last.up.environment,
        cloud=last.up.cloud,
        region=last.up.region,
        machine_types=last.up.machine_types,
        images=last.up.images,
        cost_micro_usd=micro_usd,
        started_at=lives[0].up.begun_at,
        ended_at=last.end.at,
        phases=tuple(phase for step in steps for phase in step.phases),
        version=version,
    )


def _outcome(life: Life) -> tuple[Outcome, str]:
    if failure := life.failure:
        return failure.outcome, failure.message
    agent, score = life.agent, life.score
    said = score.message if score else ""
    if agent and agent.timed_out:
        return "timed_out", f"The agent did not end in time. {said}".strip()
    if agent and agent.exit_code:
        return "agent_failed", f"The agent ended with exit code {agent.exit_code}. {said}".strip()
    return "scored", said
