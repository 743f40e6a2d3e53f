"""Rows of runs that ended without one of their own, and of runs that only seem to have ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from provisioner.batch.queue import RunState
from provisioner.batch.results import Row
from provisioner.batch.rows import collect_rows
from provisioner.costs.ledger import Ledger
from provisioner.store.environments import derived_id
from tests.unit.batch import samples
from tests.unit.batch.samples import batch, entry, run

BATCH = batch(run("one"), run("two"), run("three"))
ONE, TWO, THREE = (each.key for each in BATCH.runs)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.sqlite")


def states(**by_agent: str) -> dict[str, RunState]:
    return samples.states(**{run(agent).key: state for agent, state in by_agent.items()})


def broken(keys: Sequence[str]) -> dict[str, str]:
    return dict.fromkeys(keys, "it broke")


def test_runs_without_a_row_of_their_own_show_what_they_cost(ledger: Ledger) -> None:
    for number, micro_usd in ((1, 5), (2, 7)):
        ledger.reserve(
            entry(derived_id("fam", "main", f"b-1/{ONE}/{number}"), cloud="aws", reserved_micro_usd=micro_usd)
        )
    cancelled, failed = collect_rows(BATCH, states(one="cancelled", two="broken", three="running"), {}, broken, ledger)
    assert (cancelled.key, cancelled.outcome, cancelled.cloud) == (ONE, "cancelled", "aws")
    assert (cancelled.attempts, cancelled.cost_micro_usd) == (2, 12)
    assert cancelled.environment == derived_id("fam", "main", f"b-1/{ONE}/2")
    assert (failed.key, failed.outcome, failed.message) == (TWO, "infrastructure_failed", "it broke")
    assert (failed.attempts, failed.cost_micro_usd) == (0, 0)


def test_in_a_shared_queue_only_cancelled_runs_have_ended(ledger: Ledger) -> None:
    cancelled = states(one="cancelled", two="cancelled")

    def ended(by_operator: frozenset[str] | None) -> list[str]:
        return [row.key for row in collect_rows(BATCH, cancelled, {}, lambda _: {}, ledger, by_operator)]

    assert ended(frozenset()) == []
    assert ended(frozenset({ONE})) == [ONE]
    assert ended(None) == [ONE, TWO]


def test_rows_that_were_read_are_not_read_again(ledger: Ledger) -> None:
    known: dict[str, Row] = {}
    read: list[list[str]] = []

    def outputs(keys: Sequence[str]) -> dict[str, str]:
        read.append(list(keys))
        return broken(keys)

    for _ in range(2):
        collect_rows(BATCH, states(three="done"), known, outputs, ledger)
    assert read == [[THREE], []]


def test_a_row_that_was_changed_in_the_queue_is_a_failed_run(ledger: Ledger) -> None:
    other = Row(key=TWO, family="fam", task="main", agent="two", repetition=1, outcome="scored", score=1.0)
    outputs: dict[str, dict[str, object] | str] = {ONE: other.model_dump(mode="json"), TWO: {"score": 1}}
    ended = {**states(one="done", two="done", three="done"), "odd": RunState(key="odd", state="done")}
    rows = collect_rows(BATCH, ended, {}, lambda _: outputs, ledger)
    assert [row.key for row in rows] == [ONE, TWO, THREE]
    assert {row.outcome for row in rows} == {"infrastructure_failed"}
    assert all("not one that provisioner wrote" in row.message for row in rows)
