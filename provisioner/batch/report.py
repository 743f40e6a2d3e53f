"""The report: one HTML page that needs nothing else, with pictures drawn from the results. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import PurePosixPath
from typing import Any

from jinja2 import Environment as Templates
from jinja2 import StrictUndefined

from provisioner import package_data
from provisioner.batch.results import EARLIER, Row, by_task_and_agent, estimate
from provisioner.costs.prices import MICRO
from provisioner.ttl import words

TEMPLATE = "report.html.j2"
# Widths in the units of the pictures' own coordinates; the page scales them.
WIDTH = 640.0
ROW = 22.0
# What outcomes are called, the best first.
OUTCOMES = {
    "scored": "scored",
    "task_failed": "the task's own code failed",
    "agent_failed": "the agent failed",
    "timed_out": "the agent ran out of time",
    "infrastructure_failed": "infrastructure failed",
    "over_budget": "over budget",
    "cancelled": "cancelled",
}
MESSAGE_CHARACTERS = 300
RETRIED = "needed more than one attempt"
# In the order in which an environment lives through them; each has its colour.
PHASES = (
    "images",
    "create",
    "boot",
    "isolation",
    "start",
    "first score",
    "agent",
    "score",
    "logs",
    "teardown",
    "destroy",
    EARLIER,
)


def render(name: str, rows: Sequence[Row], made_at: datetime, logs: str = "") -> str:
    """The page.

    Args:
        name: the batch's.
        rows: one per run.
        logs: where the directories of environments' logs lie, as a URL that the page can refer to; empty: no links.
    """
    templates = Templates(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = (package_data.directory("templates") / TEMPLATE).read_text()
    return templates.from_string(text).render(
        name=name,
        made_at=f"{made_at:%Y-%m-%d %H:%M} UTC",
        totals=_totals(rows),
        scores=_scores(rows),
        costs=_bars([(task, micro / MICRO) for task, micro in _cost_by_task(rows).items()], "{:.4f} USD"),
        outcomes=_bars([(words, float(count)) for words, count in _outcomes(rows)], "{:.0f}"),
        timeline=_timeline(rows),
        phases=PHASES,
        rows=[_shown(row, logs) for row in rows],
        width=WIDTH,
        row_height=ROW,
    )


def _totals(rows: Sequence[Row]) -> dict[str, str]:
    begin = min((row.started_at for row in rows if row.started_at), default=None)
    end = max((row.ended_at for row in rows if row.ended_at), default=None)
    scored = sum(row.outcome == "scored" for row in rows)
    return {
        "runs": str(len(rows)),
        "ended well": f"{scored}",
        "failed": f"{len(rows) - scored}",
        "cost": f"{sum(row.cost_micro_usd for row in rows) / MICRO:.4f} USD",
        "time": words(end - begin) if begin and end else "-",
    }


def _scores(rows: Sequence[Row]) -> dict[str, Any]:
    """Dots with whiskers, one line per task and agent."""
    groups = [
        (task, agent, len(found), estimate([row.score for row in found if row.score is not None]))
        for (task, agent), found in by_task_and_agent(rows).items()
    ]
    known = [one for *_, one in groups if one]
    edges = [edge for one in known for edge in (one.mean, one.low, one.high) if edge is not None]
    least, most = min([0.0, *edges]), max([1.0, *edges])

    def place(value: float | None) -> float | None:
        return None if value is None or math.isinf(most - least) else round((value - least) / (most - least) * WIDTH, 2)

    lines = [
        {
            "task": task,
            "agent": agent,
            "runs": runs,
            "estimate": one,
            "x": {"mean": place(one.mean), "low": place(one.low), "high": place(one.high)} if one else None,
        }
        for task, agent, runs, one in groups
    ]
    marks = [least + (most - least) * part / 4 for part in range(5)]
    return {"lines": lines, "ticks": [{"x": place(mark), "label": f"{mark:g}"} for mark in marks]}


def _cost_by_task(rows: Sequence[Row]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        task = f"{row.family}/{row.task}"
        found[task] = found.get(task, 0) + row.cost_micro_usd
    return found


def _outcomes(rows: Sequence[Row]) -> list[tuple[str, int]]:
    counted = Counter(row.outcome for row in rows)
    found = [(words, counted[kind]) for kind, words in OUTCOMES.items() if counted[kind]]  # type: ignore[index]
    again = sum(bool(row.retried) for row in rows)
    return [*found, (RETRIED, again)] if again else found


def _bars(values: Sequence[tuple[str, float]], form: str) -> list[dict[str, Any]]:
    most = max((value for _, value in values), default=0) or 1
    return [
        {"label": label, "width": round(value / most * WIDTH, 2), "value": form.format(value)}
        for label, value in values
    ]


def _timeline(rows: Sequence[Row]) -> dict[str, Any]:
    """Each run's phases, from the batch's beginning on."""
    timed = [row for row in rows if row.started_at and row.ended_at]
    if not timed:
        return {"lines": [], "ticks": []}
    begin = min(row.started_at for row in timed if row.started_at)
    end = max(row.ended_at for row in timed if row.ended_at)
    whole = max((end - begin).total_seconds(), 1.0)
    lines = []
    for row in timed:
        at = (row.started_at - begin).total_seconds() if row.started_at else 0.0
        parts = []
        for phase in row.phases:
            parts.append(
                {
                    "x": round(at / whole * WIDTH, 2),
                    "width": round(phase.seconds / whole * WIDTH, 2),
                    "phase": phase.name,
                    "seconds": f"{phase.seconds:.1f}",
                }
            )
            at += phase.seconds
        lines.append({"key": row.key, "parts": parts})
    ticks = [{"x": WIDTH * part / 4, "label": words(timedelta(seconds=round(whole * part / 4)))} for part in range(5)]
    return {"lines": lines, "ticks": ticks}


def _shown(row: Row, logs: str) -> dict[str, Any]:
    return {
        "key": row.key,
        "outcome": OUTCOMES[row.outcome],
        "good": row.outcome == "scored",
        "score": "-" if row.score is None else f"{row.score:g}",
        "message": row.message[:MESSAGE_CHARACTERS],
        "attempts": row.attempts,
        "retried": [why[:MESSAGE_CHARACTERS] for why in row.retried],
        "cost": f"{row.cost_micro_usd / MICRO:.4f}",
        "time": words(row.ended_at - row.started_at) if row.started_at and row.ended_at else "-",
        "logs": str(PurePosixPath(logs) / row.environment / "logs") if logs and row.environment else "",
    }
