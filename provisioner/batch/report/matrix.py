"""Lays out the report's matrix of tasks and agents, and how the runs of each agent ended. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from provisioner.batch.means import Mean, mean, mean_of_means
from provisioner.batch.report.axes import Axis, count_axis, score_axis
from provisioner.batch.report.outcomes import OUTCOMES
from provisioner.batch.results import Row, by_task_and_agent

# A batch may have ten thousand tasks; beyond this many lines no reader follows a matrix.
MAX_TASKS = 300
MAX_AGENTS = 20
# How many runs of a cell are drawn one by one.
MAX_MARKS = 24


@dataclass(frozen=True)
class Cell:
    """What an agent's runs of a task came to.

    Args:
        score: the mean of the runs with a score; None without one.
        mean, low, high: where it is on the axis, and its ends a standard error away, in per cent.
        outcomes: of the first MAX_MARKS runs, the best first; more: how many there are beside them.
    """

    score: Mean | None
    mean: float | None
    low: float | None
    high: float | None
    runs: int
    scored: int
    outcomes: tuple[str, ...] = ()
    more: int = 0


@dataclass(frozen=True)
class Matrix:
    """The matrix.

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
class Ends:
    """How the runs of each agent ended.

    Args:
        lines: for each agent its bars: outcome, where it begins, its width (both in per cent) and how many runs.
        totals: how many runs of all agents had each outcome, without zeros.
    """

    lines: tuple[tuple[str, tuple[tuple[str, float, float, int], ...]], ...]
    totals: tuple[tuple[str, int], ...]
    axis: Axis
    retried: int


def matrix(rows: Sequence[Row]) -> Matrix:
    """Returns the matrix, tasks and agents in the order of the rows."""
    groups = by_task_and_agent(rows)
    all_tasks, all_agents = dict.fromkeys(task for task, _ in groups), dict.fromkeys(agent for _, agent in groups)
    tasks, agents = list(all_tasks)[:MAX_TASKS], list(all_agents)[:MAX_AGENTS]
    means = {key: mean(_scores(group)) for key, group in groups.items()}
    overall = {
        agent: mean_of_means([_scores(group) for (_, name), group in groups.items() if name == agent])
        for agent in agents
    }
    # Bars may leave the range that scores have. They are drawn as far as it goes.
    axis = score_axis(_scores(rows))
    of_agent = {agent: [row for row in rows if row.agent == agent] for agent in agents}
    return Matrix(
        agents=tuple(agents),
        lines=tuple(
            (
                task,
                tuple(
                    _cell(groups[task, agent], means[task, agent], axis, MAX_MARKS) if (task, agent) in groups else None
                    for agent in agents
                ),
            )
            for task in tasks
        ),
        overall=tuple(_cell(of_agent[agent], overall[agent], axis, 0) for agent in agents),
        axis=axis,
        left_out=(len(all_tasks) - len(tasks), len(all_agents) - len(agents)),
    )


def ends(rows: Sequence[Row]) -> Ends:
    """Returns how runs ended, agents in the order of the rows."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        counts.setdefault(row.agent, Counter())[row.outcome] += 1
    axis = count_axis(max((count.total() for count in counts.values()), default=0))
    lines = []
    for agent, count in list(counts.items())[:MAX_AGENTS]:
        bars, before = [], 0
        for outcome in OUTCOMES:
            if number := count[outcome]:
                left, right = axis.place(before), axis.place(before + number)
                bars.append((outcome, left or 0.0, round((right or 0.0) - (left or 0.0), 2), number))
                before += number
        lines.append((agent, tuple(bars)))
    totals = Counter[str](row.outcome for row in rows)
    return Ends(
        tuple(lines),
        tuple((outcome, totals[outcome]) for outcome in OUTCOMES if totals[outcome]),
        axis,
        sum(bool(row.retried) for row in rows),
    )


def _scores(rows: Sequence[Row]) -> list[float]:
    return [row.score for row in rows if row.score is not None]


def _cell(rows: Sequence[Row], score: Mean | None, axis: Axis, marks: int) -> Cell:
    order = list(OUTCOMES)
    outcomes = sorted((row.outcome for row in rows), key=order.index)[:marks]
    return Cell(
        score=score,
        mean=axis.place(score.value) if score else None,
        low=axis.place(score.low) if score else None,
        high=axis.place(score.high) if score else None,
        runs=len(rows),
        scored=len(_scores(rows)),
        outcomes=tuple(outcomes),
        more=max(0, len(rows) - marks) if marks else 0,
    )
