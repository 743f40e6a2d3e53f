"""Prepares each run for the page, with what was kept of it: printable, escaped, and bounded in bytes of HTML. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from markupsafe import Markup, escape

from provisioner.base.clock import elapsed, format_duration
from provisioner.base.printable import beginning, last_lines, printable_lines
from provisioner.batch.report.evidence import Evidence
from provisioner.batch.results import LoggedScore, Row

# How many runs the page opens; the charts count all, and results.jsonl has all.
MAX_RUNS = 1000
# Room for a mark that says where text was cut, and the fewest characters that a cut leaves. At six bytes of HTML for
# each, they are within any limit that is given.
_MARK_CHARACTERS = 10
_LEAST_CHARACTERS = 60
LEAST_BYTES = 6 * (_LEAST_CHARACTERS + _MARK_CHARACTERS)
# How much of each kind of text a run has, in bytes of HTML; less if there are many runs, so that all of them together
# stay within EVIDENCE_BYTES.
LOG_BYTES = 6 << 10
INSTRUCTIONS_BYTES = 8 << 10
SUBMISSION_BYTES = 8 << 10
OUTPUT_BYTES = 20 << 10
CALLS_BYTES = 4 << 10
MAX_SCORES = 20
SCORES_BYTES = MAX_SCORES * LEAST_BYTES
EVIDENCE_BYTES = 12 << 20


@dataclass(frozen=True)
class RunView:
    """A run as the page shows it. Markup is escaped already; the row is not.

    Args:
        seconds: how long it took; None if that is not known.
        time: the same in words.
        isolation: what came of the proof of its isolation, in a line; empty if that is not known.
        texts: titles and what was kept, in the order of reading.
        scores: the end of the score log: time, score and message.
    """

    row: Row
    seconds: float | None
    time: str
    isolation: str
    texts: tuple[tuple[str, Markup], ...]
    scores: tuple[tuple[str, str, Markup], ...]


def run_views(rows: Sequence[Row], evidence: Mapping[str, Evidence]) -> list[RunView]:
    """Returns the first MAX_RUNS runs."""
    shown = rows[:MAX_RUNS]
    whole = LOG_BYTES + INSTRUCTIONS_BYTES + SUBMISSION_BYTES + OUTPUT_BYTES + CALLS_BYTES + SCORES_BYTES
    share = min(1.0, EVIDENCE_BYTES / (whole * max(1, len(shown))))
    return [_view(row, evidence.get(row.key, Evidence()), share) for row in shown]


def first_part(text: str, limit_bytes: int) -> Markup:
    """Returns the beginning of a text as HTML, with a mark where it was cut."""
    return _fitted(beginning(text, max(limit_bytes, LEAST_BYTES)), limit_bytes, beginning)


def last_part(text: str, limit_bytes: int) -> Markup:
    """Returns the last lines of a text as HTML, below a mark if it was cut."""
    return _fitted(last_lines(text, max(limit_bytes, LEAST_BYTES)), limit_bytes, last_lines)


def _fitted(text: str, limit_bytes: int, cut: Callable[[str, int], str]) -> Markup:
    """Cuts a text until its HTML has at most the given number of bytes, or LEAST_BYTES."""
    text = printable_lines(text)
    limit_bytes = max(limit_bytes, LEAST_BYTES)
    markup = escape(text)
    while (size := len(markup.encode())) > limit_bytes:
        text = cut(text, max(_LEAST_CHARACTERS, len(text) * limit_bytes // size - _MARK_CHARACTERS))
        markup = escape(text)
    return markup


def _view(row: Row, evidence: Evidence, share: float) -> RunView:
    took = elapsed(row.started_at, row.ended_at) if row.started_at and row.ended_at else None
    submission = evidence.submission
    texts = (
        (f"The end of {evidence.log_name}", evidence.log, LOG_BYTES, last_part),
        ("Instructions", evidence.instructions.strip(), INSTRUCTIONS_BYTES, first_part),
        ("Submission", "" if submission is None else submission.strip() or "(empty)", SUBMISSION_BYTES, first_part),
        ("The agent's output", evidence.agent_output, OUTPUT_BYTES, last_part),
        ("Recorded calls", evidence.calls, CALLS_BYTES, last_part),
    )
    return RunView(
        row=row,
        seconds=None if took is None else took.total_seconds(),
        time="-" if took is None else format_duration(took),
        isolation=evidence.isolation_line.removeprefix("isolation "),
        texts=tuple((title, part(text, int(limit * share))) for title, text, limit, part in texts if text.strip()),
        scores=tuple(_score(entry, int(SCORES_BYTES * share) // MAX_SCORES) for entry in row.score_log[-MAX_SCORES:]),
    )


def _score(entry: LoggedScore, limit_bytes: int) -> tuple[str, str, Markup]:
    return (
        format_duration(timedelta(seconds=entry.elapsed_seconds)),
        "invalid" if entry.score is None else f"{entry.score:g}",
        first_part(json.dumps(entry.message, ensure_ascii=False) if entry.message else "", limit_bytes),
    )
