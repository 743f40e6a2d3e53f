"""The matrix of tasks and agents, and how runs ended."""

from __future__ import annotations

from provisioner.batch.report.matrix import MAX_MARKS, MAX_TASKS, ends, matrix
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
    assert (cell.low, cell.mean, cell.high) == (33.33, 66.67, 100.0)
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
    assert (over.low, over.high) == (33.33, 100)


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
    assert (cell.score, cell.mean, cell.low) == (None, None, None)


def test_ends_are_bars_one_after_the_other_on_whole_numbers() -> None:
    found = ends([row(1), row(2), row(3, outcome="cancelled", score=None), row(4, retried=["lost"]), row(5, agent="b")])
    assert found.lines == (
        ("solver", (("scored", 0.0, 75.0, 3), ("cancelled", 75.0, 25.0, 1))),
        ("b", (("scored", 0.0, 25.0, 1),)),
    )
    assert found.totals == (("scored", 4), ("cancelled", 1))
    assert found.retried == 1
    assert [tick.label for tick in found.axis.ticks] == ["0", "1", "2", "3", "4"]


def test_nothing_is_an_empty_matrix() -> None:
    assert matrix([]).lines == ()
    assert ends([]).lines == ()
