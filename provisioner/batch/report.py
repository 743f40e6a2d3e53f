"""Renders the report: one self-contained HTML page, with charts of the results."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from jinja2 import Environment as Templates
from jinja2 import StrictUndefined

from provisioner import package_data
from provisioner.batch.results import EARLIER, WAITING, Row, by_task_and_agent, estimate
from provisioner.costs.prices import MICRO
from provisioner.printable import printable
from provisioner.ttl import words

TEMPLATE = "report.html.j2"
# Only what can be an environment's id becomes part of a link: another text could lead to a foreign host.
_ENVIRONMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# Sizes in the charts' own coordinates, which the page scales.
WIDTH = 640.0
ROW_HEIGHT = 22.0
# What the page calls the outcomes, the best first.
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
# In the order in which an environment goes through them. Each has a colour in the template.
PHASES = (
    "images",
    "create",
    "boot",
    "isolation",
    WAITING,
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
    """Returns the page as HTML.

    Args:
        name: the batch's name.
        rows: one per run.
        made_at: when the page is made.
        logs: URL, relative to the page, of the directory with the environments' logs; empty: the page has no links.
    """
    templates = Templates(
        autoescape=True, finalize=_shown, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = (package_data.directory("templates") / TEMPLATE).read_text()
    return templates.from_string(text).render(
        name=name,
        made_at=f"{made_at:%Y-%m-%d %H:%M} UTC",
        totals=_totals(rows),
        scores=_scores(rows),
        costs=_bars([(task, micro_usd / MICRO) for task, micro_usd in _cost_by_task(rows).items()], "{:.4f} USD"),
        outcomes=_bars([(label, float(count)) for label, count in _outcomes(rows)], "{:.0f}"),
        timeline=_timeline(rows),
        phases=PHASES,
        rows=[_table_row(row, logs) for row in rows],
        width=WIDTH,
        row_height=ROW_HEIGHT,
    )


def _shown(value: object) -> object:
    """Removes control, bidirectional and invisible characters from what the template shows; not from its own markup."""
    return printable(value) if type(value) is str else value


def _totals(rows: Sequence[Row]) -> dict[str, str]:
    """Returns the figures at the top of the page, by what they are."""
    begin = min((row.started_at for row in rows if row.started_at), default=None)
    end = max((row.ended_at for row in rows if row.ended_at), default=None)
    scored = sum(row.outcome == "scored" for row in rows)
    return {
        "runs": str(len(rows)),
        "scored": str(scored),
        "failed": str(len(rows) - scored),
        "cost": f"{sum(row.cost_micro_usd for row in rows) / MICRO:.4f} USD",
        "time": words(end - begin) if begin and end else "-",
    }


def _scores(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the chart of means with their intervals, one line per task and agent."""
    groups = [
        (task, agent, len(group), estimate([row.score for row in group if row.score is not None]))
        for (task, agent), group in by_task_and_agent(rows).items()
    ]
    means = [mean for *_, mean in groups if mean]
    edges = [edge for mean in means for edge in (mean.mean, mean.low, mean.high) if edge is not None]
    least, most = min([0.0, *edges]), max([1.0, *edges])

    def position(value: float | None) -> float | None:
        return None if value is None or math.isinf(most - least) else round((value - least) / (most - least) * WIDTH, 2)

    lines = [
        {
            "task": task,
            "agent": agent,
            "runs": runs,
            "estimate": mean,
            "x": {"mean": position(mean.mean), "low": position(mean.low), "high": position(mean.high)}
            if mean
            else None,
        }
        for task, agent, runs, mean in groups
    ]
    ticks = [least + (most - least) * quarter / 4 for quarter in range(5)]
    return {"lines": lines, "ticks": [{"x": position(tick), "label": f"{tick:g}"} for tick in ticks]}


def _cost_by_task(rows: Sequence[Row]) -> dict[str, int]:
    """Returns what the runs of each task cost, in millionths of a US dollar."""
    costs: dict[str, int] = {}
    for row in rows:
        task = f"{row.family}/{row.task}"
        costs[task] = costs.get(task, 0) + row.cost_micro_usd
    return costs


def _outcomes(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """Returns how many runs had each outcome, and how many were retried; leaves out zeros."""
    counts = Counter[str](row.outcome for row in rows)
    bars = [
        *((label, counts[outcome]) for outcome, label in OUTCOMES.items()),
        (RETRIED, sum(bool(row.retried) for row in rows)),
    ]
    return [(label, count) for label, count in bars if count]


def _bars(values: Sequence[tuple[str, float]], form: str) -> list[dict[str, Any]]:
    """Returns a bar chart, the longest bar as wide as the page."""
    most = max((value for _, value in values), default=0) or 1
    return [
        {"label": label, "width": round(value / most * WIDTH, 2), "value": form.format(value)}
        for label, value in values
    ]


def _timeline(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the chart of each run's phases, from the beginning of the batch."""
    timed = [row for row in rows if row.started_at and row.ended_at]
    if not timed:
        return {"lines": [], "ticks": []}
    begin = min(row.started_at for row in timed if row.started_at)
    end = max(row.ended_at for row in timed if row.ended_at)
    duration = max((end - begin).total_seconds(), 1.0)
    lines = []
    for row in timed:
        at = (row.started_at - begin).total_seconds() if row.started_at else 0.0
        parts = []
        for phase in row.phases:
            parts.append(
                {
                    "x": round(at / duration * WIDTH, 2),
                    "width": round(phase.seconds / duration * WIDTH, 2),
                    "phase": phase.name,
                    "seconds": f"{phase.seconds:.1f}",
                }
            )
            at += phase.seconds
        lines.append({"key": row.key, "parts": parts})
    ticks = [
        {"x": WIDTH * quarter / 4, "label": words(timedelta(seconds=round(duration * quarter / 4)))}
        for quarter in range(5)
    ]
    return {"lines": lines, "ticks": ticks}


def _table_row(row: Row, logs: str) -> dict[str, Any]:
    """Returns a row of the table of runs."""
    return {
        "key": row.key,
        "outcome": OUTCOMES[row.outcome],
        "good": row.outcome == "scored",
        "score": "-" if row.score is None else f"{row.score:g}",
        "message": row.message[:MESSAGE_CHARACTERS],
        "attempts": row.attempts,
        "retried": [reason[:MESSAGE_CHARACTERS] for reason in row.retried],
        "cost": f"{row.cost_micro_usd / MICRO:.4f}",
        "time": words(row.ended_at - row.started_at) if row.started_at and row.ended_at else "-",
        "logs": f"{logs}/{row.environment}/logs" if logs and _ENVIRONMENT.fullmatch(row.environment) else "",
    }
