"""What a worker queues, and what it makes of other workers' runs, without an engine."""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path
from typing import cast

import pytest

from provisioner.base.clock import now
from provisioner.base.config import Settings
from provisioner.base.errors import LivenessLostError
from provisioner.batch import worker
from provisioner.batch.queue import QueueClient, RunState
from provisioner.batch.worker import LivenessLock, Worker, reconcile_cancellations
from provisioner.store.home import Home
from tests.unit.batch.samples import states
from tests.waiting import BOUND_SECONDS


class Queue:
    """A queue whose runs have other states when they are read again."""

    def __init__(self, later: dict[str, RunState]) -> None:
        self.later = later
        self.calls: list[tuple[str, list[str]]] = []

    def states(self, _batch: str) -> dict[str, RunState]:
        return self.later

    def cancel(self, _batch: str, keys: list[str]) -> None:
        self.calls += [("cancel", keys)] if keys else []

    def resume(self, _batch: str, keys: list[str]) -> None:
        self.calls += [("resume", keys)] if keys else []


def dead(names: Collection[str]) -> set[str]:
    return {"dead"} & set(names)


def test_a_dead_workers_requeued_runs_are_queued_again() -> None:
    before = states(
        lost="cancelled by dead", requeued="cancelled by dead", taken="cancelled by dead", coming="cancelled by alive",
        stopped="cancelled by dead", back="queued by dead", again="running by alive", done="done by dead",
    )  # fmt: skip
    # Between the two reads the worker has requeued one run before it died, and another worker has taken one.
    queue = Queue({**before, **states(requeued="queued by dead", taken="running by alive")})
    cancelled = frozenset({"stopped", "back", "again", "done"})
    reconcile_cancellations(cast(QueueClient, queue), dead, "b-1", before, cancelled)
    assert queue.calls == [("cancel", ["back", "again"]), ("resume", ["lost"])]


def test_runs_that_a_live_worker_is_requeueing_are_left_to_it() -> None:
    queue = Queue({})
    reconcile_cancellations(cast(QueueClient, queue), dead, "b-1", states(coming="cancelled by alive"), frozenset())
    assert queue.calls == []


def test_a_stopped_worker_requeues_only_what_is_still_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = ("mine", "again", "resumed", "taken", "lost", "done")
    queue = Queue({**states(**dict.fromkeys(keys, "running by controller")), **states(other="running by other")})
    real_cancel = queue.cancel

    def cancel(batch: str, cancelled: list[str]) -> None:
        real_cancel(batch, cancelled)
        queue.later |= states(**dict.fromkeys(cancelled, "cancelled by controller"))

    def work() -> None:
        with stopped.live_status.track("b-1/mine") as run:
            begun.set()
            assert run.stop.wait(BOUND_SECONDS)
            # While it cleans up, the operator cancels a run, and other workers take this one for dead.
            queue.later["again"] = queue.later["again"].model_copy(update={"changed_at": now()})
            queue.later |= states(
                resumed="queued by controller", taken="running by other", lost="cancelled by other",
                done="done by other",
            )  # fmt: skip

    monkeypatch.setattr(queue, "cancel", cancel)
    monkeypatch.setattr(worker, "Engine", lambda *_: None)
    monkeypatch.setattr(worker, "QueueClient", lambda _: queue)
    stopped = Worker(Home(tmp_path), Settings(), lambda _: None)
    begun = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(BOUND_SECONDS)
    stopped.stop(requeue=True)
    thread.join(BOUND_SECONDS)
    assert queue.calls == [("cancel", list(keys)), ("resume", ["mine"])]


def test_an_unreachable_database_is_a_lost_connection() -> None:
    with pytest.raises(LivenessLostError, match="cannot be reached") as error:
        LivenessLock("postgresql://nobody:secret@127.0.0.1:1/nothing", "worker")
    assert "secret" not in error.value.message
