"""Agents and batches compared, pair by pair."""

from __future__ import annotations

import math

import pytest

from provisioner.batch.comparison import compare_agents, compare_batches, over_tasks
from provisioner.batch.intervals import newcombe, student
from provisioner.batch.results import Row


def rows(task: str, agent: str, *scores: float | None) -> list[Row]:
    return [
        Row(
            key=f"fam/{task}/{agent}/{number}", family="fam", task=task, agent=agent, repetition=number,
            outcome="scored" if score is not None else "agent_failed", score=score,
        )
        for number, score in enumerate(scores, 1)
    ]  # fmt: skip


def test_agents_are_paired_by_task_and_tasks_weigh_the_same() -> None:
    results = [
        *rows("a", "old", 0.0, 0.0, 1.0, 0.0), *rows("a", "new", 1.0, 1.0, 1.0, 0.0),
        *rows("b", "old", 0.2), *rows("b", "new", 0.4),
        *rows("c", "old", 0.5), *rows("c", "new", 0.5),
        *rows("d", "old", 0.9), *rows("d", "new", 0.1),
        *rows("only-old", "old", 1.0),
    ]  # fmt: skip
    found = compare_agents(results, "old", "new")
    assert found is not None
    assert [pair.task for pair in found.pairs] == ["fam/a", "fam/b", "fam/c", "fam/d"]
    assert found.difference == student([0.5, 0.2, 0.0, 0.1 - 0.9])
    assert (found.better, found.equal, found.worse) == (2, 1, 1)


def test_a_single_pair_has_its_own_interval() -> None:
    found = compare_agents([*rows("a", "old", 0.0, 0.0, 1.0), *rows("a", "new", 1.0, 1.0)], "old", "new")
    assert found is not None
    assert found.difference == newcombe(1 / 3, 3, 1.0, 2)


def test_agents_without_a_task_in_common_cannot_be_compared() -> None:
    assert compare_agents([*rows("a", "old", 1.0), *rows("b", "new", 1.0)], "old", "new") is None
    assert compare_agents([*rows("a", "old", 1.0), *rows("a", "new", None)], "old", "new") is None


def test_runs_without_a_score_count_in_no_mean() -> None:
    found = compare_agents([*rows("a", "old", 1.0, None, math.nan), *rows("a", "new", 1.0)], "old", "new")
    assert found is not None
    assert found.pairs[0].first.count == 1
    assert found.difference.mean == 0


def test_batches_are_paired_by_task_and_agent() -> None:
    first = [*rows("a", "x", 0.0), *rows("b", "x", 0.0), *rows("a", "y", 1.0), *rows("gone", "x", 1.0)]
    second = [*rows("a", "x", 1.0), *rows("b", "x", 0.5), *rows("a", "y", 1.0), *rows("new", "y", 1.0)]
    found = compare_batches(first, second)
    assert found.overall is not None
    assert [(pair.task, pair.agent) for pair in found.overall.pairs] == [
        ("fam/a", "x"), ("fam/b", "x"), ("fam/a", "y"),
    ]  # fmt: skip
    assert found.overall.difference.mean == pytest.approx(0.5)
    assert {agent: len(each.pairs) for agent, each in found.by_agent.items()} == {"x": 2, "y": 1}
    assert (found.only_first, found.only_second) == (("fam/gone, x",), ("fam/new, y",))


def test_unrelated_batches_have_no_overall_difference() -> None:
    found = compare_batches(rows("a", "x", 1.0), rows("b", "x", 1.0))
    assert found.overall is None
    assert found.by_agent == {}


def test_the_mean_over_tasks_gives_each_task_the_same_weight() -> None:
    found = over_tasks([*rows("a", "x", *[1.0] * 9), *rows("b", "x", 0.0), *rows("b", "y", 1.0)], "x")
    assert found == student([1.0, 0.0])
    single = over_tasks(rows("a", "x", 1.0, 0.0), "x")
    assert single is not None
    assert single.low == pytest.approx(0.0945, abs=1e-4)  # Wilson's, of its runs
    assert over_tasks(rows("a", "x", None), "x") is None
