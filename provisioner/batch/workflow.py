"""A run from its first attempt to its row: which step follows which. Decides; the steps do.

The same answers of the steps lead to the same decisions: after a crash it is begun again, and steps that had ended give
what they gave before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from provisioner.batch.attempts import Attempt
from provisioner.batch.results import EARLIER, Outcome, Row
from provisioner.batch.steps import AgentStep, Costs, EndStep, Failure, ScoreStep, Step, UpStep
from provisioner.batch.suite import Run
from provisioner.models import Phase, Record

# Interruptions do not count as retries; somebody who interrupts for ever has to give up at some time.
MAX_ATTEMPTS = 30
PAUSE_SECONDS = 2.0
# Others give back what they have only when they end.
CAPACITY_PAUSE_SECONDS = 30.0

S = TypeVar("S", bound=Step)
StepRunner = Callable[[str, type[S], Callable[[], S]], S]


class AttemptResult(Record):
    """What one attempt came to."""

    up: UpStep
    agent: AgentStep | None = None
    score: ScoreStep | None = None
    end: EndStep

    @property
    def failure(self) -> Failure | None:
        """The first thing that went wrong."""
        return next((step.failure for step in (self.up, self.agent, self.score) if step and step.failure), None)


def run_attempt(attempt: Attempt, do: StepRunner[Step]) -> AttemptResult:
    """One attempt, to the proof that its environment is gone."""
    up = _done(do, "up", UpStep, attempt.up)
    agent = None if up.failure else _done(do, "agent", AgentStep, attempt.agent)
    score = None
    if agent and not agent.failure:
        ended_at = agent.at
        score = _done(do, "score", ScoreStep, lambda: attempt.score(ended_at))
    end = _done(do, "end", EndStep, lambda: attempt.end(came_up=up.failure is None))
    return AttemptResult(up=up, agent=agent, score=score, end=end)


def run_workflow(
    run: Run,
    retries: int,
    attempt_of: Callable[[int, int], Attempt],
    do: StepRunner[Step],
    version: str,
) -> Row:
    """All attempts at a run.

    Args:
        retries: how often infrastructure may fail.
        attempt_of: the attempt with a number, after so many failures for want of capacity.
        do: does a step, or gives what it gave before.
        version: of provisioner.
    """
    lives: list[AttemptResult] = []
    shortages = 0
    while True:
        attempt = attempt_of(len(lives) + 1, shortages)
        lives.append(run_attempt(attempt, do))
        failure = lives[-1].failure
        if not failure or len(lives) == MAX_ATTEMPTS:
            break
        if not failure.interrupted:
            if not failure.retry or retries == 0:
                break
            retries -= 1
            shortages += failure.capacity
            seconds = CAPACITY_PAUSE_SECONDS if failure.capacity else PAUSE_SECONDS
            _done(do, "pause", Step, lambda attempt=attempt, seconds=seconds: attempt.pause(seconds))  # type: ignore[misc]
    costs = _done(do, "costs", Costs, lambda: attempt.costs([one.up.environment for one in lives]))
    return build_row(run, lives, costs, version)


def _done(do: StepRunner[Step], name: str, kind: type[S], work: Callable[[], S]) -> S:
    done = do(name, kind, work)
    assert isinstance(done, kind)
    return done


def build_row(run: Run, lives: list[AttemptResult], costs: Costs, version: str) -> Row:
    """The row of a run. Pure."""
    last = lives[-1]
    outcome, message = _outcome(last)
    stuck = [one for one in lives if one.end.trouble]
    troubles = [f"{one.up.environment} is not confirmed to be gone: {one.end.trouble}" for one in stuck]
    if costs.trouble:
        troubles.append(f"Its cost is not known: {costs.trouble}")
    message = " ".join(filter(None, [message, *troubles]))
    steps = [step for step in (last.up, last.agent, last.score, last.end) if step]
    phases = [phase for step in steps for phase in step.phases]
    if len(lives) > 1:
        seconds = (last.up.begun_at - lives[0].up.begun_at).total_seconds()
        phases.insert(0, Phase(name=EARLIER, seconds=seconds))
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
        retried=tuple(one.failure.message for one in lives[:-1] if one.failure),
        environment=last.up.environment,
        cloud=last.up.cloud,
        region=last.up.region,
        machine_types=last.up.machine_types,
        images=last.up.images,
        cost_micro_usd=costs.micro_usd,
        started_at=lives[0].up.begun_at,
        ended_at=last.end.at,
        phases=tuple(phases),
        version=version,
    )


def _outcome(life: AttemptResult) -> tuple[Outcome, str]:
    if failure := life.failure:
        return failure.outcome, failure.message
    agent, score = life.agent, life.score
    said = score.message if score else ""
    if agent and agent.timed_out:
        return "timed_out", f"The agent did not end in time. {said}".strip()
    if agent and agent.exit_code:
        return "agent_failed", f"The agent ended with exit code {agent.exit_code}. {said}".strip()
    return "scored", said
