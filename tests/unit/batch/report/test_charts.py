"""The matrix of tasks and agents, how runs ended, and what tasks cost."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from provisioner.batch.report.charts import MAX_MARKS, MAX_TASKS, Axis, Bar, costs, ends, matrix, score_axis
from tests.unit.batch.report.samples import row


def test_a_cell_has_the_mean_its_standard_error_and_each_run() -> None:
    rows = [
        row(1),
        row(2, score=0.0),
        row(3, outcome="timed_out", score=1.0),
        row(4, outcome="agent_failed", score=None),
    ]
    found = matrix([*rows, row(5, agent="other", task="hard")])
    assert found.agents == ("solver", "other")
    assert [task for task, _ in found.lines] == ["guess/easy", "guess/hard"]
    cell, nothing = found.lines[0][1]
    assert nothing is None
    assert cell is not None
    assert str(cell.score) == "0.67 ± 0.33"
    assert (cell.mean, cell.ends) == (66.67, (33.33, 100.0))
    assert (cell.runs, cell.scored) == (4, 3)
    assert cell.outcomes == ("scored", "scored", "agent_failed", "timed_out")
    assert found.overall[0].score == cell.score


def test_all_tasks_weigh_the_same_and_bars_end_where_the_axis_ends() -> None:
    found = matrix([row(1, task="a", score=1.0), row(2, task="a", score=1.0), row(3, task="b", score=0.0)])
    overall = found.overall[0]
    assert str(overall.score) == "0.50 ± 0.50"
    beyond = matrix([row(1, task="a", score=1.0), row(2, task="b", score=1.0), row(3, task="c", score=0.4)])
    assert str(beyond.overall[0].score) == "0.80 ± 0.20"
    over = matrix([row(number, score=score) for number, score in enumerate([1.0] * 2 + [0.0])]).overall[0]
    assert over.ends == (33.33, 100)


def test_what_is_too_much_to_read_is_counted() -> None:
    rows = [row(number) for number in range(MAX_MARKS + 3)]
    cell = matrix(rows).lines[0][1][0]
    assert cell is not None
    assert (len(cell.outcomes), cell.more) == (MAX_MARKS, 3)
    many = matrix([row(1, task=f"t{number}") for number in range(MAX_TASKS + 2)])
    assert (len(many.lines), many.left_out) == (MAX_TASKS, (2, 0))


def test_a_task_without_scores_has_no_mean() -> None:
    cell = matrix([row(1, outcome="task_failed", score=None)]).lines[0][1][0]
    assert cell is not None
    assert (cell.score, cell.mean, cell.ends) == (None, None, None)


def test_ends_are_bars_one_after_the_other() -> None:
    assert ends([row(1), row(2), row(3, outcome="cancelled", score=None), row(4), row(5, agent="b")]) == [
        ("solver", 4, [Bar("scored", 0.0, 75.0, 3), Bar("cancelled", 75.0, 25.0, 1)]),
        ("b", 1, [Bar("scored", 0.0, 25.0, 1)]),
    ]
    assert ends([]) == []


def test_costs_are_left_out_if_nothing_is_billed() -> None:
    assert costs([row(1), row(2)]) == costs([]) == []
    billed = [row(1, cost_micro_usd=10_000), row(2, cost_micro_usd=2500), row(3, task="b", cost_micro_usd=5000)]
    assert costs(billed) == [("guess/easy", 100, "0.0125"), ("guess/b", 40, "0.0050")]


def test_the_axis_holds_all_scores_and_at_least_those_from_0_to_1() -> None:
    assert [label for _, label in score_axis([0.2, 0.7]).ticks] == ["0", "0.25", "0.5", "0.75", "1"]
    assert [label for _, label in score_axis([-20.0, 20.0]).ticks] == ["-20", "-10", "0", "10", "20"]
    assert [Axis(-1, 1).place(value) for value in (-1, 0, 0.5, 7)] == [0, 50, 75, 100]


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=20))
def test_any_scores_have_an_axis(scores: list[float]) -> None:
    axis = score_axis(scores)
    assert axis.low < axis.high
    assert all(math.isfinite(axis.place(score)) and 0 <= axis.place(score) <= 100 for score in scores)
