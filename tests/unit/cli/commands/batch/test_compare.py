"""Two batches compared, as a table and as data."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from provisioner.batch.records import Batch, Batches
from provisioner.batch.results import Row
from provisioner.batch.suite import Suite
from provisioner.store.home import Home
from tests.unit.conftest import CommandLine

AT = datetime(2026, 1, 2, tzinfo=UTC)
SUITE = Suite.model_validate({"name": "s", "families": [{"path": "fam"}], "submissions": [{"name": "x", "text": ""}]})


def ended(provisioner: CommandLine, name: str, scores: dict[tuple[str, str], list[float | None]]) -> None:
    """Has the home keep the results of a batch."""
    rows = [
        Row(
            key=f"fam/{task}/{agent}/{number}", family="fam", task=task, agent=agent, repetition=number,
            outcome="agent_failed" if score is None else "scored", score=score,
        )
        for (task, agent), group in scores.items()
        for number, score in enumerate(group, 1)
    ]  # fmt: skip
    home = Home(provisioner.home)
    home.make()
    batch = Batch(id=name, suite=SUITE, suite_file="/s.yaml", shared=False, created_at=AT, version="1", runs=())
    Batches(home).save(batch)
    Batches(home).write_results(batch, rows)


@pytest.fixture
def two(provisioner: CommandLine) -> CommandLine:
    ended(provisioner, "old-1", {("a", "x"): [0.0] * 10, ("b", "x"): [0.2], ("a", "y"): [0.5], ("gone", "x"): [1.0]})
    ended(provisioner, "new-2", {("a", "x"): [1.0] * 10, ("b", "x"): [0.4], ("a", "y"): [0.25, None]})
    return provisioner


def test_a_table_shows_each_pair_and_all_together(two: CommandLine) -> None:
    done = two("batch", "compare", "old", "new")
    assert done.code == 0
    lines = done.stdout.splitlines()
    assert lines[:2] == ["A: old-1", "B: new-2"]
    assert lines[4].split("  ")[0] == "fam/a"
    # Newcombe 1998, table II, method 10.
    assert lines[4].endswith("+1.00  +0.61 to +1.00")
    assert lines[5].endswith("+0.20  -")
    assert "x: +0.60 (95 %: -4.48 to +5.68); 2 better, 0 equal, 0 worse." in lines
    assert "y: -0.25; 0 better, 0 equal, 1 worse." in lines
    assert "B - A over all: +0.32 (95 %: -1.26 to +1.89); 2 better, 0 equal, 1 worse." in lines
    assert lines[-1] == "Only in A: fam/gone, x."


def test_the_data_has_the_same(two: CommandLine) -> None:
    data = two("batch", "compare", "old", "new", "--json").json
    assert (data["first"], data["second"], data["only_first"], data["only_second"]) == (
        "old-1", "new-2", ["fam/gone, x"], [],
    )  # fmt: skip
    assert [(pair["task"], pair["agent"], pair["difference"]["mean"]) for pair in data["pairs"]] == [
        ("fam/a", "x", 1.0), ("fam/b", "x", 0.2), ("fam/a", "y", -0.25),
    ]  # fmt: skip
    assert data["pairs"][1]["difference"]["low"] is None
    assert data["overall"]["pairs"] == 3
    assert data["by_agent"]["x"]["better"] == 2


def test_unrelated_batches_are_an_error_that_explains_pairs(provisioner: CommandLine) -> None:
    ended(provisioner, "old-1", {("a", "x"): [1.0]})
    ended(provisioner, "new-2", {("a", "x"): [None], ("b", "x"): [1.0]})
    done = provisioner("batch", "compare", "old", "new")
    assert done.code == 2
    assert "have no task and agent in common" in done.stderr
    assert "paired by the names of family, task and agent" in done.stderr
