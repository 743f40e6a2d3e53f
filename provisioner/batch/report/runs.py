"""Prepares each run for the page, with what was kept of it, within bounds. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from markupsafe import Markup

from provisioner.batch.report.evidence import Evidence
from provisioner.batch.report.outcomes import OUTCOMES, PHASE_CHARACTERS
from provisioner.batch.report.texts import LEAST_BYTES, first_part, last_part
from provisioner.batch.results import Row
from provisioner.batch.score_log import LoggedScore
from provisioner.clock import elapsed
from provisioner.costs.prices import MICRO
from provisioner.ttl import format_duration

# How many runs the page opens; the charts count all, and results.jsonl has all.
MAX_RUNS = 1000
# How much of each kind of text a run has, in bytes of HTML; less if there are many runs, so that all of them together
# stay within EVIDENCE_BYTES.
INSTRUCTIONS_BYTES = 8 << 10
SUBMISSION_BYTES = 8 << 10
OUTPUT_BYTES = 20 << 10
LOG_BYTES = 6 << 10
CALLS_BYTES = 4 << 10
MAX_SCORES = 20
SCORES_BYTES = MAX_SCORES * LEAST_BYTES
EVIDENCE_BYTES = 12 << 20
NAME_BYTES = 1000
MESSAGE_BYTES = 3000
MAX_RETRIED = 5
MAX_WARNINGS = 5
MAX_PHASES = 30


@dataclass(frozen=True)
class RunView:
    """A run as the page shows it. Markup is escaped already.

    Args:
        recording: the hash that stands for its sealed logs; empty if there is none.
        isolation: what came of the proof of its isolation, in a line; empty if that is not known.
        seconds: how long it took; None if that is not known. For sorting, as `number` is.
        texts: titles and what was kept, in the order of reading.
        scores: of the score log: time, score and message. more_scores: how many are not shown.
        phases: name and seconds.
    """

    key: str
    number: int
    family: str
    task: str
    agent: str
    repetition: int
    outcome: str
    label: str
    score: float | None
    seconds: float | None
    time: str
    cost: str
    micro_usd: int
    attempts: int
    message: Markup
    warnings: tuple[Markup, ...]
    retried: tuple[Markup, ...]
    exit_code: int | None
    environment: str
    recording: str
    isolation: str
    place: str
    texts: tuple[tuple[str, Markup], ...]
    scores: tuple[tuple[str, str, Markup], ...]
    more_scores: int
    phases: tuple[tuple[str, str], ...]


def run_views(rows: Sequence[Row], evidence: Mapping[str, Evidence]) -> list[RunView]:
    """Returns the first MAX_RUNS runs."""
    shown = rows[:MAX_RUNS]
    whole = INSTRUCTIONS_BYTES + SUBMISSION_BYTES + OUTPUT_BYTES + LOG_BYTES + CALLS_BYTES + SCORES_BYTES
    share = min(1.0, EVIDENCE_BYTES / (whole * max(1, len(shown))))
    return [_view(number, row, evidence.get(row.key, Evidence()), share) for number, row in enumerate(shown)]


def _view(number: int, row: Row, evidence: Evidence, share: float) -> RunView:
    seconds = elapsed(row.started_at, row.ended_at).total_seconds() if row.started_at and row.ended_at else None
    return RunView(
        key=row.key,
        number=number,
        family=row.family,
        task=row.task,
        agent=row.agent,
        repetition=row.repetition,
        outcome=row.outcome,
        label=OUTCOMES[row.outcome],
        score=row.score,
        seconds=seconds,
        time=format_duration(row.ended_at - row.started_at) if row.started_at and row.ended_at else "-",
        cost=f"{row.cost_micro_usd / MICRO:.4f}",
        micro_usd=row.cost_micro_usd,
        attempts=row.attempts,
        message=first_part(row.message, MESSAGE_BYTES),
        warnings=tuple(first_part(warning, NAME_BYTES) for warning in row.warnings[:MAX_WARNINGS]),
        retried=tuple(first_part(reason, NAME_BYTES) for reason in row.retried[:MAX_RETRIED]),
        exit_code=row.agent_exit_code,
        environment=row.environment,
        recording=row.recording,
        isolation=evidence.isolation_line.removeprefix("isolation "),
        place=", ".join(part for part in (row.cloud, row.region, *row.machine_types.values()) if part),
        texts=tuple(_texts(evidence, share)),
        scores=tuple(_scores(row.score_log, share)),
        more_scores=max(0, len(row.score_log) - MAX_SCORES),
        phases=tuple((phase.name[:PHASE_CHARACTERS], f"{phase.seconds:.1f}") for phase in row.phases[:MAX_PHASES]),
    )


def _texts(evidence: Evidence, share: float) -> list[tuple[str, Markup]]:
    texts = []
    if evidence.log.strip():
        texts.append((f"The end of {evidence.log_name}", last_part(evidence.log, int(LOG_BYTES * share))))
    if evidence.instructions.strip():
        texts.append(("Instructions", first_part(evidence.instructions.strip(), int(INSTRUCTIONS_BYTES * share))))
    if evidence.submission is not None:
        submission = evidence.submission.strip() or "(empty)"
        texts.append(("Submission", first_part(submission, int(SUBMISSION_BYTES * share))))
    if evidence.agent_output.strip():
        texts.append(("The agent's output", last_part(evidence.agent_output, int(OUTPUT_BYTES * share))))
    if evidence.calls:
        texts.append(("Recorded calls", last_part(evidence.calls, int(CALLS_BYTES * share))))
    return texts


def _scores(log: Sequence[LoggedScore], share: float) -> list[tuple[str, str, Markup]]:
    """Returns the last entries of a score log."""
    limit = int(SCORES_BYTES * share) // MAX_SCORES
    return [
        (
            format_duration(timedelta(seconds=entry.elapsed_seconds)),
            "invalid" if entry.score is None else f"{entry.score:g}",
            first_part(json.dumps(entry.message, ensure_ascii=False) if entry.message else "", limit),
        )
        for entry in log[-MAX_SCORES:]
    ]
