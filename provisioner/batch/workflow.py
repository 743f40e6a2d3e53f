"""A run's workflow: the order of its steps, from the first attempt to the row of results. Decides, but does nothing.

The workflow is deterministic, given the results of its steps. So it can be started again after a crash: a step that
had ended returns its earlier result instead of being done again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from provisioner.base.clock import elapsed
from provisioner.base.models import Phase, Record
from provisioner.batch.attempt import Attempt
from provisioner.batch.results import EARLIER, Outcome, Row
from provisioner.batch.steps import AgentStep, Costs, EndStep, Failure, ScoreStep, Step, UpStep
from provisioner.batch.suite import Run

# Interruptions do not count as retries, but there must be an end to them, too.
MAX_ATTEMPTS = 30
PAUSE_SECONDS = 2.0
# A cloud has capacity again once other environments have ended.
CAPACITY_PAUSE_SECONDS = 30.0

S = TypeVar("S", bound=Step)
# Takes a step's name, the type of its result, and the work; returns the result, or an earlier process's if it has one.
StepRunner = Callable[[str, type[S], Callable[[], S]], S]


class AttemptResult(Record):
    """The results of one attempt's steps; None for steps that were not reached."""

    up: UpStep
    agent: AgentStep | None = None
    score: ScoreStep | None = None
    end: EndStep

    @property
    def failure(self) -> Failure | None:
        """The first failure among the steps; None if all went well."""
        return next((step.failure for step in (self.up, self.agent, self.score) if step and step.failure), None)


def run_attempt(attempt: Attempt, run_step: StepRunner[Step]) -> AttemptResult:
    """Runs one attempt's steps. The last, `end`, destroys its environment and notes if that is not confirmed."""
    up = _checked(run_step, "up", UpStep, attempt.up)
    agent = None if up.failure else _checked(run_step, "agent", AgentStep, attempt.agent)
    score = None
    if agent and not agent.failure:
        ended_at = agent.at
        score = _checked(run_step, "score", ScoreStep, lambda: attempt.score(ended_at))
    end = _checked(run_step, "end", EndStep, lambda: attempt.end(came_up=up.failure is None))
    return AttemptResult(up=up, agent=agent, score=score, end=end)


def run_workflow(
    run: Run, retries: int, new_attempt: Callable[[int, int], Attempt], run_step: StepRunner[Step], version: str
) -> Row:
    """Runs as many attempts as a run needs, and returns its row of results.

    Args:
        retries: how many failures of the infrastructure are retried.
        new_attempt: returns the attempt with a number, given how many attempts before it found no capacity.
        run_step: runs a step, or returns the result that it had before a crash.
        version: of provisioner.
    """
    results: list[AttemptResult] = []
    shortages = 0
    while True:
        attempt = new_attempt(len(results) + 1, shortages)
        results.append(run_attempt(attempt, run_step))
        failure = results[-1].failure
        if not failure or len(results) == MAX_ATTEMPTS:
            break
        if not failure.interrupted:
            if not failure.retry or (retries == 0 and not failure.throttled):
                break
            retries -= not failure.throttled
            shortages += failure.capacity
            seconds = CAPACITY_PAUSE_SECONDS if failure.capacity or failure.throttled else PAUSE_SECONDS
            _checked(run_step, "pause", Step, partial(attempt.pause, seconds))
    environments = [result.up.environment for result in results]
    costs = _checked(run_step, "costs", Costs, lambda: attempt.costs(environments))
    return build_row(run, results, costs, version)


def _checked(run_step: StepRunner[Step], name: str, kind: type[S], work: Callable[[], S]) -> S:
    """Runs a step and checks that its result has the expected type."""
    result = run_step(name, kind, work)
    assert isinstance(result, kind)
    return result


def build_row(run: Run, results: list[AttemptResult], costs: Costs, version: str) -> Row:
    """Returns the row of a run, from the results of its attempts in their order. Pure."""
    last = results[-1]
    outcome, message = _outcome(last)
    errors = [
        f"{result.up.environment} is not confirmed to be gone: {result.end.removal_error}"
        for result in results
        if result.end.removal_error
    ]
    if costs.cost_error:
        errors.append(f"Its cost is not known: {costs.cost_error}")
    message = " ".join(filter(None, [message, *errors]))
    steps = [step for step in (last.up, last.agent, last.score, last.end) if step]
    phases = [phase for step in steps for phase in step.phases]
    if len(results) > 1:
        seconds = elapsed(results[0].up.begun_at, last.up.begun_at).total_seconds()
        phases.insert(0, Phase(name=EARLIER, seconds=seconds))
    return Row(
        key=run.key,
        family=run.key.split("/")[0],
        family_version=last.end.family_version,
        task=run.task,
        agent=run.agent,
        agent_files=last.end.agent_files,
        repetition=run.repetition,
        outcome=outcome,
        score=last.score.score if last.score else None,
        message=message,
        agent_exit_code=last.agent.exit_code if last.agent else None,
        attempts=len(results),
        retried=tuple(result.failure.message for result in results[:-1] if result.failure),
        environment=last.up.environment,
        cloud=last.up.cloud,
        region=last.up.region,
        machine_types=last.up.machine_types,
        images=last.end.images or last.up.images,
        cost_micro_usd=costs.micro_usd,
        started_at=results[0].up.begun_at,
        ended_at=last.end.at,
        phases=tuple(phases),
        score_log=last.end.score_log,
        score_log_entries=last.end.score_log_entries,
        recording=last.end.recording,
        warnings=last.up.warnings,
        version=version,
    )


def _outcome(result: AttemptResult) -> tuple[Outcome, str]:
    if failure := result.failure:
        return failure.outcome, failure.message
    agent, score = result.agent, result.score
    scoring_message = score.message if score else ""
    if agent and agent.timed_out:
        return "timed_out", f"The agent did not end in time. {scoring_message}".strip()
    if agent and agent.unknown_end:
        return "agent_failed", f"{agent.unknown_end} {scoring_message}".strip()
    if agent and agent.exit_code:
        return "agent_failed", f"The agent ended with exit code {agent.exit_code}. {scoring_message}".strip()
    return "scored", scoring_message
