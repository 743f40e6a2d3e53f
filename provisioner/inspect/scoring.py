"""Scores a task family's task under Inspect: the sample's store, the tools of intermediate scoring, the scorers.

Names are those of METR's own bridge to Inspect, so that what reads its logs reads ours.
"""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

from inspect_ai.log import transcript
from inspect_ai.model import ChatMessageAssistant
from inspect_ai.scorer import Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import Tool, ToolError, ToolSource, tool
from inspect_ai.util import OutputLimitExceededError, SandboxUnavailableError, StoreModel, sandbox, store_as
from pydantic import Field

from provisioner.base.errors import AgentError, SubmissionError, TaskError
from provisioner.base.printable import encodable
from provisioner.environment.operations import SUBMISSION
from provisioner.family.scores import ScoreResult
from provisioner.inspect import blocking
from provisioner.inspect.failures import LossError, full_message, in_full, unavailable
from provisioner.inspect.sample import SampleMachines
from provisioner.inspect.sandbox import ProvisionerSandbox

SUBMIT = "submit"
# The metadata of a score of 0 for an agent that left its machine so that nothing can be scored.
AGENT_FAILED = {"agent_failed": True}
# A replayed score counts as the expected one if it differs by less.
TOLERANCE = 0.01
# How long the machine may take to say whether it has a submission file.
FILE_SECONDS = 60


class TaskDriverStore(StoreModel):
    """What the sample's store keeps of its task.

    Args:
        intermediate_scores: each with score, message, details and time.
        scoring_visible_to_agent: whether the agent may see the scores.
    """

    intermediate_scores: list[dict[str, Any]] = Field(default_factory=list)
    scoring_visible_to_agent: bool = False
    task_family: str = ""
    task_name: str = ""


@solver
def begin() -> Solver:
    """Returns the step that writes into the sample's store which task it is, and records that its agent begins."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        kept = store_as(TaskDriverStore)
        kept.task_family = str(state.metadata["task_family"])
        kept.task_name = str(state.metadata["task_name"])
        kept.scoring_visible_to_agent = bool(state.metadata["provisioner"]["scoring_visible_to_agent"])
        kept.intermediate_scores = _score_log(machines())
        await blocking.call(machines().begin_agent)
        return state

    return solve


def machines() -> SampleMachines:
    """Returns the machines of the current sample.

    Raises:
        TypeError: they are not of the sandbox provisioner.
    """
    return sandbox("default").as_type(ProvisionerSandbox).machines


class ScoringTools(ToolSource):
    """The tools `score` and `score_log`, of tasks with intermediate scoring only."""

    async def tools(self) -> list[Tool]:
        """Returns the tools that the current sample has."""
        if not machines().environment.has_intermediate_score:
            return []
        return [score(), score_log()]


@tool
def score() -> Tool:
    """Returns the tool that scores the work so far."""

    async def execute() -> str:
        """Scores your work on the task so far. The task continues."""
        here = machines()
        try:
            with full_message(here.session.redactor):
                result = await blocking.score(here.intermediate_score)
        except (TaskError, LossError) as error:
            # An error of the sample could be tried again, so no agent must be able to bring one about: the score at
            # the end decides. What the family's code said may tell how it scores, and is for the operator alone.
            transcript().info(str(error), source="provisioner")
            if isinstance(error, LossError):
                raise unavailable(error, "The machine does not answer.") from error
            raise ToolError("Your work could not be scored now. The task continues.") from error
        store_as(TaskDriverStore).intermediate_scores = _score_log(here)
        return json.dumps(result.visible)

    return execute


@tool
def score_log() -> Tool:
    """Returns the tool that shows the scores so far."""

    async def execute() -> str:
        """Shows the scores of your work so far, as far as you may see them."""
        kept = store_as(TaskDriverStore)
        hidden = () if kept.scoring_visible_to_agent else ("score",)
        shown = [
            {key: value for key, value in entry.items() if key not in ("details", *hidden)}
            for entry in kept.intermediate_scores
        ]
        return json.dumps(shown)

    return execute


def _score_log(of: SampleMachines) -> list[dict[str, Any]]:
    return [
        {
            "score": entry.score,
            "message": entry.message,
            "details": entry.details,
            "scored_at": entry.scored_at.isoformat(),
            "elapsed_seconds": entry.elapsed_seconds,
        }
        for entry in of.environment.score_log
    ]


@scorer(metrics=[accuracy()])
def score_metr_task(nan_is_zero: bool = True) -> Scorer:
    """Returns the scorer that has the family score the submission.

    Args:
        nan_is_zero: whether a score of NaN counts as 0.
    """

    async def score(state: TaskState, target: Target) -> Score:
        return await _score(state, nan_is_zero)

    return score


@scorer(metrics=[accuracy()])
def check_expected_score() -> Scorer:
    """Returns the scorer of replays: 1 where the family gives the expected score, else 0."""

    async def score(state: TaskState, target: Target) -> Score:
        replayed = await _score(state, nan_is_zero=True)
        expected = state.metadata["expected_score"]
        kept = {name: value for name, value in (replayed.metadata or {}).items() if name in ("warnings", *AGENT_FAILED)}
        has_failed = bool(kept.keys() & AGENT_FAILED.keys())
        is_close = not has_failed and (
            expected is None
            if isinstance(replayed.value, float) and math.isnan(replayed.value)
            else expected is not None and abs(replayed.as_float() - expected) < TOLERANCE
        )
        return Score(
            value=float(is_close),
            answer=replayed.answer,
            explanation=replayed.explanation,
            metadata={"replay": replayed.value, "expected": expected, **kept},
        )

    return score


async def _score(state: TaskState, nan_is_zero: bool) -> Score:
    here = machines()
    submission = await _submission(state)
    with full_message(here.session.redactor):
        try:
            environment, result = await blocking.score(partial(here.score, submission))
        except (AgentError, SubmissionError) as error:
            return _agent_failed(submission, in_full(error, here.session.redactor))
        store_as(TaskDriverStore).intermediate_scores = _score_log(here)
        score = as_score(f"{environment.family}/{environment.task}", result, submission, nan_is_zero)
        refused = [f"Tools and the agent had no machine from some time on: {loss}" for loss in here.losses]
        if warnings := [*environment.setup.warnings, *refused]:
            score.metadata = {**(score.metadata or {}), "warnings": warnings}
        return score


def _agent_failed(submission: str | None, said: str) -> Score:
    """Returns the score of an agent whose doing it is that nothing can be scored: an error could be tried again."""
    return Score(value=0.0, answer=submission, explanation=said, metadata=dict(AGENT_FAILED))


def as_score(task: str, result: ScoreResult, submission: str | None, nan_is_zero: bool) -> Score:
    """Returns Inspect's score for what came of scoring, under METR's names. Pure.

    Args:
        task: the task, for the error.
        submission: what was scored; None for the machine's own file.

    Raises:
        TaskError: the family's scoring failed, which is never a score of 0, unless it ended out of memory: what
            an agent leaves behind may take that.
    """
    if result.kind == "killed":
        return _agent_failed(submission, result.message)
    if result.kind == "manual_scoring_required":
        said = "A person has to score it."
        return Score(value=math.nan, answer=submission, explanation=said, metadata={"manual-scoring": True})
    if result.kind == "nan":
        return Score(value=0.0 if nan_is_zero else math.nan, answer=submission, explanation=result.message)
    if result.score is None:
        raise TaskError(f"{task}: {result.message}", details=result.details)
    return Score(value=result.score, answer=submission)


async def _submission(state: TaskState) -> str | None:
    """Returns what the last call of `submit` said, else None if the machine has a file, else the completion."""
    for message in reversed(state.messages):
        if isinstance(message, ChatMessageAssistant):
            for made in reversed(message.tool_calls or []):
                if made.function == SUBMIT:
                    return encodable(str(next(iter(made.arguments.values()), "")))
    try:
        # As root, whose memory and processes no agent can take.
        asked = ["/usr/bin/test", "-e", SUBMISSION]
        found = await sandbox("default").exec(asked, user="root", timeout=FILE_SECONDS)
    except (SandboxUnavailableError, OutputLimitExceededError, OSError):  # whose doing it is, the scoring finds out
        return state.output.completion
    return None if found.success else state.output.completion
