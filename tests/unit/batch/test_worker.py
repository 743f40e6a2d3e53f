"""What a process that works on batches shows, stops and hands on, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import pytest

from provisioner.batch.engine import QueueClient, RunState
from provisioner.batch.live_status import LiveStatus
from provisioner.batch.records import Batch, Batches
from provisioner.batch.results import Row
from provisioner.batch.suite import Run, Suite
from provisioner.batch.worker import mend_handing_back, needed, rows_of
from provisioner.cli import batch_running
from provisioner.cli.batch_running import Patience
from provisioner.costs.ledger import Entry, Ledger
from provisioner.errors import InfrastructureError, PresenceLostError
from provisioner.store.environments import derived_id
from provisioner.store.home import Home

AT = datetime(2026, 1, 2, tzinfo=UTC)
SUITE = Suite.model_validate(
    {
        "name": "s",
        "families": [{"path": "a"}, {"path": "b"}],
        "agents": [{"name": name, "directory": ".", "command": "true"} for name in ("one", "two")],
        "submissions": [{"name": "three", "text": "x" * 1000}],
    }
)


def run(agent: str) -> Run:
    return Run(key=f"fam/main/{agent}/1", family="/fam", task="main", agent=agent, repetition=1)


def test_an_order_holds_what_its_run_needs_of_the_suite() -> None:
    assert [one.name for one in needed(SUITE, run("two")).agents] == ["two"]
    assert needed(SUITE, run("two")).submissions == ()
    assert [one.name for one in needed(SUITE, run("three")).submissions] == ["three"]
    assert needed(SUITE, run("one")).limits == SUITE.limits


def test_runs_without_a_row_of_their_own_show_what_they_cost(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    batch = Batch(
        id="b-1", suite=SUITE, suite_file="/s.yaml", shared=False, created_at=AT, version="1",
        runs=(run("one"), run("two"), run("three")),
    )  # fmt: skip
    for number, usd in ((1, 5), (2, 7)):
        name = derived_id("fam", "main", f"b-1/fam/main/one/1/{number}")
        ledger.hold(
            Entry(
                environment=name, kind="task", cloud="aws", region="r", family="fam", task="main", batch="b-1",
                project="", command="b-1", launched_at=AT, expires_at=AT + timedelta(hours=1), held_micro_usd=usd,
            )
        )  # fmt: skip
    states = {
        "fam/main/one/1": RunState(key="fam/main/one/1", state="cancelled"),
        "fam/main/two/1": RunState(key="fam/main/two/1", state="broken"),
        "fam/main/three/1": RunState(key="fam/main/three/1", state="running"),
    }

    def outputs(keys: Sequence[str]) -> dict[str, str]:
        return dict.fromkeys(keys, "it broke")

    one, two = rows_of(batch, states, {}, outputs, ledger)
    assert (one.outcome, one.attempts, one.cost_micro_usd, one.cloud) == ("cancelled", 2, 12, "aws")
    assert one.environment == derived_id("fam", "main", "b-1/fam/main/one/1/2")
    assert (two.outcome, two.attempts, two.cost_micro_usd) == ("infrastructure_failed", 0, 0)


def test_what_a_worker_hands_back_has_not_ended(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.make()
    batch = Batch(
        id="b-1", suite=SUITE, suite_file="/s.yaml", shared=True, created_at=AT, version="1",
        runs=(run("one"), run("two")),
    )  # fmt: skip
    batches = Batches(home)
    batches.save(batch)
    states = {one.key: RunState(key=one.key, state="cancelled") for one in batch.runs}

    def ended() -> list[str]:
        return [
            row.key
            for row in rows_of(batch, states, {}, lambda _: {}, Ledger(tmp_path / "none"), batches.cancelled(batch))
        ]

    assert ended() == []
    batches.note_cancelled(batch, ["fam/main/one/1"])
    assert ended() == ["fam/main/one/1"]
    batches.note_cancelled(batch, ["fam/main/two/1"])
    assert ended() == ["fam/main/one/1", "fam/main/two/1"]
    batches.forget_cancelled(batch)
    assert ended() == []
    assert batches.cancelled(batch.model_copy(update={"shared": False})) is None


class Queue:
    """A register whose runs change between two looks."""

    def __init__(self, later: dict[str, RunState]) -> None:
        self.later = later
        self.asked: list[tuple[str, list[str]]] = []

    def states(self, _batch: str) -> dict[str, RunState]:
        return self.later

    def cancel(self, _batch: str, keys: list[str]) -> None:
        self.asked += [("cancel", keys)] if keys else []

    def resume(self, _batch: str, keys: list[str]) -> None:
        self.asked += [("resume", keys)] if keys else []


def test_what_a_dead_worker_was_handing_back_is_queued_again_and_what_was_cancelled_is_not() -> None:
    def found(**states: str) -> dict[str, RunState]:
        told = {key: value.split(" by ") for key, value in states.items()}
        return {key: RunState.model_validate({"key": key, "state": s, "executor": e}) for key, (s, e) in told.items()}

    before = found(
        lost="cancelled by dead", handed="cancelled by dead", taken="cancelled by dead", coming="cancelled by alive",
        stopped="cancelled by dead", back="queued by dead", again="running by alive", done="done by dead",
    )  # fmt: skip
    # Between the two looks its worker has ended in good order, and another one has taken a run.
    queue = Queue({**before, **found(handed="queued by dead", taken="running by alive")})
    cancelled = frozenset({"stopped", "back", "again", "done"})
    mend_handing_back(cast(QueueClient, queue), lambda names: {"dead"} & set(names), "b-1", before, cancelled)
    assert queue.asked == [("cancel", ["back", "again"]), ("resume", ["lost"])]
    queue = Queue({})
    mend_handing_back(cast(QueueClient, queue), lambda _: (), "b-1", found(coming="cancelled by alive"), frozenset())
    assert queue.asked == []


def test_a_run_that_is_begun_again_beside_its_end_stays_on_the_board() -> None:
    live_status = LiveStatus()
    with live_status.track("run") as old:
        again = live_status.track("run")
        new = again.__enter__()
    assert live_status.active_runs() == [new]
    live_status.stop("run")
    assert (old.stop.is_set(), new.stop.is_set()) == (False, True)
    again.__exit__(None, None, None)
    assert live_status.active_runs() == []


def test_a_database_that_fails_for_a_while_is_borne(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    patience = Patience(said.append)
    for _ in range(3):
        with patience.bearing():
            raise InfrastructureError("It restarts.")
    assert len(said) == 1
    with patience.bearing():
        pass
    with patience.bearing():
        raise OSError("disk full")
    assert len(said) == 2
    monkeypatch.setattr(batch_running, "PATIENCE_SECONDS", -1.0)
    with pytest.raises(OSError, match="disk full"), patience.bearing():
        raise OSError("disk full")
    with pytest.raises(PresenceLostError), Patience(said.append).bearing():
        raise PresenceLostError("Others take us for dead.")


def test_rows_that_were_read_are_not_asked_for_again(tmp_path: Path) -> None:
    batch = Batch(
        id="b-1", suite=SUITE, suite_file="/s.yaml", shared=False, created_at=AT, version="1", runs=(run("one"),)
    )
    known: dict[str, Row] = {}
    asked: list[list[str]] = []

    def outputs(keys: Sequence[str]) -> dict[str, str]:
        asked.append(list(keys))
        return dict.fromkeys(keys, "it broke")

    states = {"fam/main/one/1": RunState(key="fam/main/one/1", state="done")}
    for _ in range(2):
        rows_of(batch, states, known, outputs, Ledger(tmp_path / "none"))
    assert asked == [["fam/main/one/1"], []]
