"""Lays out two charts: the phases of each run of a batch over time, and the cost of each task. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from provisioner.batch.report.axes import Axis, amount_axis, time_axis
from provisioner.batch.report.outcomes import PHASE_CHARACTERS, part_of
from provisioner.batch.results import Row
from provisioner.costs.prices import MICRO

MAX_LINES = 200
MAX_PHASES = 30
MAX_TASKS = 100


@dataclass(frozen=True)
class Bar:
    """A phase: of which part, where it begins and its width, both in per cent, and its words."""

    part: int
    at: float
    width: float
    words: str


@dataclass(frozen=True)
class Timeline:
    """What the runs were at, from the beginning of the batch.

    Args:
        left_out: how many runs are not drawn.
    """

    lines: tuple[tuple[str, tuple[Bar, ...]], ...]
    axis: Axis
    left_out: int


@dataclass(frozen=True)
class CostChart:
    """What the runs of each task cost: the bar's width in per cent, and US dollars in words."""

    lines: tuple[tuple[str, float, str], ...]
    axis: Axis


def timeline(rows: Sequence[Row]) -> Timeline:
    """Returns the chart of each run's phases."""
    timed = [(row, row.started_at, row.ended_at) for row in rows if row.started_at and row.ended_at]
    begin = min((started for _, started, _ in timed), default=None)
    end = max((ended for *_, ended in timed), default=None)
    axis = time_axis((end - begin).total_seconds() if begin and end else 1.0)
    lines = []
    for row, started, _ in timed[:MAX_LINES]:
        at, bars = (started - begin).total_seconds() if begin else 0.0, []
        for phase in row.phases[:MAX_PHASES]:
            left, right = axis.place(at) or 0.0, axis.place(at + phase.seconds) or 0.0
            words = f"{phase.name[:PHASE_CHARACTERS]}: {phase.seconds:.1f} s"
            bars.append(Bar(part_of(phase.name), left, round(max(0.0, right - left), 2), words))
            at += phase.seconds
        lines.append((row.key, tuple(bars)))
    return Timeline(tuple(lines), axis, len(timed) - len(lines))


def cost_chart(rows: Sequence[Row]) -> CostChart:
    """Returns the chart of costs by task; it has no lines if nothing cost anything."""
    costs: dict[str, int] = {}
    for row in rows:
        task = f"{row.family}/{row.task}"
        costs[task] = costs.get(task, 0) + row.cost_micro_usd
    if not any(costs.values()):
        return CostChart((), amount_axis(1.0))
    dearest = sorted(costs.items(), key=lambda item: -item[1])[:MAX_TASKS]
    axis = amount_axis(dearest[0][1] / MICRO)
    return CostChart(
        tuple((task, axis.place(cost / MICRO) or 0.0, f"{cost / MICRO:.4f}") for task, cost in dearest), axis
    )
