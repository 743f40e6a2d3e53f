"""Agents compared with each other on one axis around no difference."""

from __future__ import annotations

import pytest

from provisioner.batch.report.pairs import MAX_PAIRS, pairs
from tests.unit.batch.report.samples import row


def test_each_two_agents_with_a_task_in_common_are_compared() -> None:
    rows = [
        row(1, agent="a", score=0.2), row(1, agent="b", score=0.6), row(1, agent="a", task="hard", score=0.1),
        row(1, agent="b", task="hard", score=0.2), row(1, agent="alone", task="other"),
    ]  # fmt: skip
    found = pairs(rows)
    [line] = found.lines
    assert (line.first, line.second, line.comparison.better, line.comparison.worse) == ("a", "b", 2, 0)
    assert line.comparison.difference.mean == 0.25
    assert found.axis.place(0) == 50
    assert line.mean is not None
    assert line.mean > 50
    assert -found.axis.low == found.axis.high >= (line.comparison.difference.high or 0)


def test_one_agent_is_compared_with_none() -> None:
    assert pairs([row(1), row(2)]).lines == ()
    assert pairs([]).lines == ()


def test_there_is_an_end_to_comparisons() -> None:
    assert len(pairs([row(1, agent=f"a{number}") for number in range(30)]).lines) == MAX_PAIRS


@pytest.mark.parametrize("score", [0.5, 1e308], ids=["equal", "huge"])
def test_any_difference_has_an_axis(score: float) -> None:
    found = pairs([row(1, agent="a", score=score), row(1, agent="b", score=-score if score > 1 else score)])
    assert [tick.label for tick in found.axis.ticks] == ["-1.0", "-0.5", "0", "0.5", "1.0"]
    assert found.axis.place(0) == 50
