"""What runs say together: means, intervals, files."""

from __future__ import annotations

import csv
import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.batch.results import Row, as_csv, as_jsonl, by_task_and_agent, estimate, wilson


def row(task: str = "easy", agent: str = "solver", repetition: int = 1, score: float | None = 1.0) -> Row:
    return Row(
        key=f"guess/{task}/{agent}/{repetition}", family="guess", task=task, agent=agent, repetition=repetition,
        outcome="scored", score=score,
    )  # fmt: skip


def test_shares_get_wilsons_interval() -> None:
    # Newcombe 1998, table I: 81 of 263, and 0 of 20.
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0, 0.1611), abs=5e-5)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=50))
def test_the_mean_lies_in_its_interval(scores: list[float]) -> None:
    mean = estimate(scores)
    assert mean is not None
    assert mean.low is not None
    assert mean.high is not None
    assert mean.low - 1e-9 <= mean.mean <= mean.high + 1e-9


def test_astronomical_scores_have_a_mean_and_no_interval() -> None:
    mean = estimate([1e308, 1e308, 0.5])
    assert mean is not None
    assert mean.mean == pytest.approx(1e308 / 3 * 2)
    assert (mean.low, mean.high) == (None, None)


def test_no_number_is_no_score() -> None:
    assert estimate([]) is None
    assert estimate([math.nan]) is None
    mean = estimate([0.5])
    assert mean is not None
    assert (mean.count, mean.mean, mean.low, mean.high) == (1, 0.5, None, None)


def test_rows_are_grouped_and_written_whole() -> None:
    rows = [row(), row(repetition=2, score=None), row(task="hard", score=math.nan)]
    assert {group: len(members) for group, members in by_task_and_agent(rows).items()} == {
        ("guess/easy", "solver"): 2, ("guess/hard", "solver"): 1,
    }  # fmt: skip
    lines = as_jsonl(rows).splitlines()
    assert [json.loads(line)["key"] for line in lines] == [result.key for result in rows]
    assert math.isnan(json.loads(lines[2])["score"])
    read = list(csv.DictReader(io.StringIO(as_csv(rows))))
    assert [line["repetition"] for line in read] == ["1", "2", "1"]
    assert json.loads(read[0]["machine_types"]) == {}
