"""Lays out the report's charts: scores by task and agent, how runs ended, and what tasks cost. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from provisioner.batch.results import OUTCOMES, Mean, Row, by_task_and_agent, mean, mean_of_means
from provisioner.costs.prices import MICRO

# A batch may have ten thousand tasks; beyond this many lines no reader follows a matrix.
MAX_TASKS = 300
MAX_AGENTS = 20
# How many runs of a cell are drawn one by one.
MAX_MARKS = 24
MAX_COSTS = 100


@dataclass(frozen=True)
class Axis:
    """The axis of scores, from `low` to `high`."""

    low: float
    high: float

    def place(self, value: float) -> float:
        """Returns where a value is, from 0 to 100 per cent."""
        return round(max(0.0, min(100.0, (value - self.low) / (self.high - self.low) * 100)), 2)

    @property
    def ticks(self) -> list[tuple[int, str]]:
        """The numbers on the axis, each with its place in per cent."""
        return [(at, f"{self.low + (self.high - self.low) * at / 100:.3g}") for at in (0, 25, 50, 75, 100)]


@dataclass(frozen=True)
class Cell:
    """What an agent's runs of a task came to.

    Args:
        score: the mean of the runs with a score; None without one.
        mean: where it is on the axis, in per cent.
        ends: where its ends are, a standard error away; None without a standard error.
        outcomes: of the first MAX_MARKS runs, the best first; more: how many there are beside them.
    """

    score: Mean | None
    mean: float | None
    ends: tuple[float, float] | None
    runs: int
    scored: int
    outcomes: tuple[str, ...] = ()
    more: int = 0


@dataclass(frozen=True)
class Matrix:
    """The matrix of scores.

    Args:
        lines: each task with its cells, one for each agent; None where the agent had no run of it.
        overall: a cell for each agent, over all its tasks.
        left_out: how many tasks, and how many agents, are not shown.
    """

    agents: tuple[str, ...]
    lines: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    overall: tuple[Cell, ...]
    axis: Axis
    left_out: tuple[int, int]


@dataclass(frozen=True)
class Bar:
    """The runs of an agent with the same outcome: where their bar begins and its width, both in per cent."""

    outcome: str
    at: float
    width: float
    runs: int


def score_axis(scores: Sequence[float]) -> Axis:
    """Returns an axis that holds all finite scores, and at least all from 0 to 1."""
    finite = [score for score in scores if math.isfinite(score)]
    low, high = min([0.0, *finite]), max([1.0, *finite])
    return Axis(low, high) if high - low < 1e300 else Axis(0.0, 1.0)  # a family may return any finite number


def matrix(rows: Sequence[Row]) -> Matrix:
    """Returns the matrix, tasks and agents in the order of the rows."""
    groups = by_task_and_agent(rows)
    tasks = list(dict.fromkeys(task for task, _ in groups))
    agents = list(dict.fromkeys(agent for _, agent in groups))
    shown = agents[:MAX_AGENTS]
    axis = score_axis(_scores(rows))
    lines = []
    for task in tasks[:MAX_TASKS]:
        of_agents = [groups.get((task, agent)) for agent in shown]
        cells = [_cell(group, mean(_scores(group)), axis, MAX_MARKS) if group else None for group in of_agents]
        lines.append((task, tuple(cells)))
    overall = []
    for agent in shown:
        by_task = [group for (_, name), group in groups.items() if name == agent]
        score = mean_of_means([_scores(group) for group in by_task])
        overall.append(_cell([row for group in by_task for row in group], score, axis, 0))
    left_out = (max(0, len(tasks) - MAX_TASKS), len(agents) - len(shown))
    return Matrix(tuple(shown), tuple(lines), tuple(overall), axis, left_out)


def ends(rows: Sequence[Row]) -> list[tuple[str, int, list[Bar]]]:
    """Returns each agent with its number of runs and the bars of their outcomes, agents in the order of the rows."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        counts.setdefault(row.agent, Counter())[row.outcome] += 1
    most = max((count.total() for count in counts.values()), default=1)
    lines = []
    for agent, count in list(counts.items())[:MAX_AGENTS]:
        bars, before = [], 0
        for outcome in OUTCOMES:
            if runs := count[outcome]:
                bars.append(Bar(outcome, _per_cent(before, most), _per_cent(runs, most), runs))
                before += runs
        lines.append((agent, before, bars))
    return lines


def costs(rows: Sequence[Row]) -> list[tuple[str, float, str]]:
    """Returns the dearest tasks: name, width of the bar in per cent, US dollars in words; none if nothing cost any."""
    by_task = Counter[str]()
    for row in rows:
        by_task[f"{row.family}/{row.task}"] += row.cost_micro_usd
    dearest = by_task.most_common(MAX_COSTS)
    most = dearest[0][1] if dearest else 0
    return [(task, _per_cent(cost, most), f"{cost / MICRO:.4f}") for task, cost in dearest] if most else []


def _per_cent(part: int, whole: int) -> float:
    return round(100 * part / whole, 2)


def _scores(rows: Sequence[Row]) -> list[float]:
    return [row.score for row in rows if row.score is not None]


def _cell(rows: Sequence[Row], score: Mean | None, axis: Axis, marks: int) -> Cell:
    outcomes = sorted((row.outcome for row in rows), key=list(OUTCOMES).index)[:marks]
    around = None
    if score and score.stderr is not None:  # bars may leave the range that scores have
        around = (axis.place(score.value - score.stderr), axis.place(score.value + score.stderr))
    return Cell(
        score=score,
        mean=axis.place(score.value) if score else None,
        ends=around,
        runs=len(rows),
        scored=len(_scores(rows)),
        outcomes=tuple(outcomes),
        more=max(0, len(rows) - marks) if marks else 0,
    )
