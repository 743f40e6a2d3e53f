"""Writes a batch's results as logs of Inspect: one for each family and agent, a sample for each run.

A run has no conversation: its instructions are the sample's input, its submission is the output, and the agent's output
is an event. Where Inspect names the model, the agent is named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from pathlib import Path

from inspect_ai.event import Event, InfoEvent, ScoreEvent
from inspect_ai.log import (
    EvalConfig,
    EvalDataset,
    EvalError,
    EvalLog,
    EvalMetric,
    EvalResults,
    EvalSample,
    EvalSampleLimit,
    EvalScore,
    EvalSpec,
    EvalStats,
    write_eval_log,
)
from inspect_ai.model import ChatMessage, ChatMessageAssistant, ChatMessageUser, ModelOutput
from inspect_ai.scorer import Score
from pydantic import JsonValue

from provisioner.base.clock import elapsed
from provisioner.base.printable import printable, printable_lines
from provisioner.batch.records import Batch
from provisioner.batch.report.evidence import Evidence
from provisioner.batch.results import OUTCOMES, Row, mean
from provisioner.costs.prices import MICRO

SCORER = "provisioner"
# Inspect's models are named PROVIDER/NAME.
MODEL = "provisioner/{}"
# These are errors in Inspect's sense: no score of such a run exists, and the agent is not judged by it.
ERRORS = ("task_failed", "infrastructure_failed", "over_budget", "cancelled")


def write_logs(
    batch: Batch, rows: Sequence[Row], evidence: Mapping[str, Evidence], directory: Path
) -> list[Path]:  # fmt: skip
    """Writes the logs, and returns their paths.

    Args:
        evidence: what was kept of runs, by their keys.

    Raises:
        OSError: a log cannot be written.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.family, row.agent), []).append(row)
    paths = []
    for (family, agent), group in groups.items():
        # The same in each export of the batch, which so replaces the logs of an earlier one.
        identity = sha256(f"{family}\0{agent}".encode()).hexdigest()[:8]
        name = re.sub("[^A-Za-z0-9]+", "-", f"{family}-{agent}").strip("-")[:100]
        path = directory / f"{batch.created_at:%Y-%m-%dT%H-%M-%S}_{name}_{identity}.eval"
        write_eval_log(eval_log(batch, group, evidence), path)
        paths.append(path)
    return paths


def eval_log(batch: Batch, rows: Sequence[Row], evidence: Mapping[str, Evidence]) -> EvalLog:
    """Returns the log of the runs of one family with one agent. Pure."""
    first = rows[0]
    tasks = list(dict.fromkeys(printable(row.task) for row in rows))
    begin = min((row.started_at for row in rows if row.started_at), default=None)
    end = max((row.ended_at for row in rows if row.ended_at), default=None)
    limit = batch.suite.limits.agent_limit.total_seconds()
    agent = printable(first.agent)
    commands = [each.command for each in batch.suite.agents if each.name == first.agent]
    return EvalLog(
        status="cancelled" if any(row.outcome == "cancelled" for row in rows) else "success",
        eval=EvalSpec(
            created=batch.created_at.isoformat(timespec="seconds"),
            task=printable(first.family),
            run_id=batch.id,
            eval_set_id=batch.id,
            dataset=EvalDataset(name=printable(first.family), samples=len(tasks), sample_ids=tasks),
            model=MODEL.format(agent),
            solver=agent,
            config=EvalConfig(epochs=batch.suite.repetitions, time_limit=int(limit)),
            packages={"provisioner": batch.version},
            metadata={
                "batch": batch.id, "suite": batch.suite.name, "cloud": batch.suite.cloud,
                "command": printable_lines(commands[0]) if commands else "",
                "ttl": batch.suite.limits.ttl, "retries": batch.suite.retries,
            },
        ),
        results=_results(rows),
        stats=EvalStats(started_at=_time(begin), completed_at=_time(end)),
        samples=[_sample(row, evidence.get(row.key, Evidence()), limit) for row in rows],
    )  # fmt: skip


def _results(rows: Sequence[Row]) -> EvalResults:
    scores = [row.score for row in rows if row.score is not None]
    found = mean(scores)
    figures = {"mean": found.value, "stderr": found.stderr} if found else {}
    metrics = {name: EvalMetric(name=name, value=value) for name, value in figures.items() if value is not None}
    unscored = len(rows) - len(scores)
    score = EvalScore(
        name=SCORER, scorer=SCORER, scored_samples=len(scores), unscored_samples=unscored, metrics=metrics
    )
    completed = sum(row.outcome not in ERRORS for row in rows)
    return EvalResults(total_samples=len(rows), completed_samples=completed, scores=[score])


def _sample(row: Row, evidence: Evidence, limit_seconds: float) -> EvalSample:
    said = printable_lines(row.message)
    instructions = printable_lines(evidence.instructions)
    submission = None if evidence.submission is None else printable_lines(evidence.submission)
    messages: list[ChatMessage] = [ChatMessageUser(content=instructions)]
    if submission is not None:
        messages.append(ChatMessageAssistant(content=submission))
    score = None if row.score is None else Score(value=row.score, answer=submission, explanation=said or None)
    seconds = elapsed(row.started_at, row.ended_at).total_seconds() if row.started_at and row.ended_at else None
    failed = row.outcome in ERRORS
    return EvalSample(
        id=printable(row.task),
        epoch=row.repetition,
        input=instructions,
        target="",
        messages=messages,
        output=ModelOutput.from_content(MODEL.format(printable(row.agent)), submission or ""),
        scores={SCORER: score} if score else {},
        metadata=_metadata(row, said, evidence),
        events=_events(row, evidence),
        started_at=_time(row.started_at) or None,
        completed_at=_time(row.ended_at) or None,
        total_time=seconds,
        error=_error(row, said, evidence) if failed else None,
        limit=EvalSampleLimit(type="time", limit=limit_seconds) if row.outcome == "timed_out" else None,
    )


def _metadata(row: Row, said: str, evidence: Evidence) -> dict[str, object]:
    return {
        "outcome": row.outcome,
        "message": said,
        "warnings": [printable_lines(warning) for warning in row.warnings],
        "agent_exit_code": row.agent_exit_code,
        "attempts": row.attempts,
        "environment": printable(row.environment),
        "cloud": printable(row.cloud),
        "region": printable(row.region),
        "machine_types": {printable(role): printable(kind) for role, kind in row.machine_types.items()},
        "recording": printable(row.recording),
        "isolation": printable(evidence.isolation_line),
        "cost_usd": row.cost_micro_usd / MICRO,
        "seconds": {printable(phase.name): phase.seconds for phase in row.phases},
    }


def _error(row: Row, said: str, evidence: Evidence) -> EvalError:
    log = printable_lines(evidence.log)
    return EvalError(message=said or OUTCOMES[row.outcome], traceback=log, traceback_ansi=log)


def _events(row: Row, evidence: Evidence) -> list[Event]:
    """Returns the score log, the proof of isolation, and what was recorded, at times of the run."""
    events: list[Event] = [
        ScoreEvent(
            timestamp=entry.scored_at,
            working_start=max(0.0, entry.elapsed_seconds),
            # An invalid submission has no number, and NaN is no JSON.
            score=Score(value="invalid" if entry.score is None else entry.score, metadata={"message": entry.message}),
            intermediate=True,
            scorer=SCORER,
        )
        for entry in row.score_log
    ]
    if ended := row.ended_at or row.started_at:
        events += [_info(row.started_at or ended, "isolation", evidence.isolation)] if evidence.isolation else []
        for source, text in (("the agent's output", evidence.agent_output), ("recorded calls", evidence.calls)):
            events += [_info(ended, source, printable_lines(text))] if text else []
    return events


def _info(at: datetime, source: str, data: JsonValue) -> InfoEvent:
    return InfoEvent(timestamp=at, working_start=0.0, source=source, data=data)


def _time(at: datetime | None) -> str:
    return at.isoformat(timespec="seconds") if at else ""
