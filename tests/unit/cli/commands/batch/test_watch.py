"""What another terminal shows of a batch."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta

import pytest

from provisioner.base.errors import InfrastructureError
from provisioner.batch.queue import QueueClient, RunState
from provisioner.batch.records import Batch, Batches
from provisioner.cli.commands.batch import lookup, watch
from provisioner.cli.commands.batch.watch import active_runs, doing
from provisioner.session import Session
from provisioner.store.environments import derived_id
from provisioner.store.files import locked
from provisioner.store.home import Home
from tests.unit.batch import samples
from tests.unit.batch.samples import AT, run
from tests.unit.conftest import CommandLine
from tests.unit.fakes.clock import WaitingClock
from tests.unit.fakes.world import environment

KEYS = [run("guess", number).key for number in range(1, 4)]


@pytest.fixture
def batch() -> Batch:
    return samples.batch(*(run("guess", number) for number in range(1, 4)), id="s-1")


def attempt(key: str, number: int) -> str:
    return derived_id("fam", "main", f"s-1/{key}/{number}")


@pytest.mark.parametrize(
    ("changes", "phase"),
    [
        ({"status": "creating"}, "coming up"),
        ({"status": "ready"}, "ready"),
        ({"status": "ready", "agent_at": AT}, "agent"),
        ({"status": "ready", "agent_at": AT, "agent_ended_at": AT}, "score"),
        ({"status": "destroying", "agent_at": AT}, "destroy"),
    ],
)
def test_the_live_view_shows_phases_from_the_record(changes: dict[str, object], phase: str) -> None:
    assert doing(environment("x").model_copy(update=changes)) == phase


def test_runs_are_shown_with_what_their_agents_say(session: Session, batch: Batch) -> None:
    store = session.environments
    working = {"batch": "s-1", "status": "ready", "agent_at": AT}
    store.save(environment(attempt(KEYS[0], 2)).model_copy(update=working))
    store.save(environment(attempt(KEYS[2], 1)).model_copy(update=working))  # has ended for the queue
    log = store.logs(attempt(KEYS[0], 2)) / "agent.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"x" * 5000 + b"\nlooking around\xff\n")
    states = {key: RunState(key=key, state="running") for key in KEYS[:2]} | {
        KEYS[2]: RunState(key=KEYS[2], state="done")
    }
    first, second = active_runs(session, batch, states)
    assert (first.key, first.phase, first.attempt) == (f"s-1/{KEYS[0]}", "agent", 2)
    assert first.output.endswith("\nlooking around\ufffd\n")
    assert len(first.output) <= 1000
    assert (second.key, second.phase, second.output) == (f"s-1/{KEYS[1]}", "", "")


def test_watching_ends_when_no_controller_runs_the_batch(provisioner: CommandLine, batch: Batch) -> None:
    Batches(Home(provisioner.home)).save(batch)
    shown = provisioner("batch", "watch", "s-1")
    assert shown.code == 0
    assert "0/3 ended" in shown.stdout
    assert "provisioner batch resume s-1" in shown.stdout


def test_the_queue_is_found_once_its_controller_has_made_it(
    session: Session, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {KEYS[0]: RunState(key=KEYS[0], state="running")}
    closed, close = [], QueueClient.close

    def closing(client: QueueClient) -> None:
        closed.append(True)
        close(client)

    monkeypatch.setattr(QueueClient, "close", closing)
    Batches(session.home).save(batch)
    monkeypatch.setattr(lookup, "now", lambda: AT)
    with lookup.reader(session.home, batch, "") as read:
        assert read() == ({}, [])
        (Batches(session.home).directory(batch.id) / "engine.sqlite").touch()
        assert read() == ({}, [])  # it has no tables yet
        monkeypatch.setattr(QueueClient, "states", lambda *_: states)
        assert (read()[0], closed) == (states, [])
    assert closed == [True]
    monkeypatch.undo()
    with lookup.reader(session.home, batch, "") as read, pytest.raises(InfrastructureError):
        read()  # it is old, and its queue is damaged


def use(clock: WaitingClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a batch's watching begin when the batch was made, and time pass when it waits."""
    monkeypatch.setattr(watch, "time", clock)
    monkeypatch.setattr(watch, "now", lambda: AT + timedelta(seconds=clock.seconds))


def test_a_new_batch_is_watched_until_its_controller_ends(
    provisioner: CommandLine, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = Batches(Home(provisioner.home))
    batches.save(batch)
    with ExitStack() as controller:

        def work(seconds: float) -> None:
            if seconds == 10:
                controller.enter_context(locked(batches.lock("s-1")))
            elif seconds == 100:
                controller.close()

        clock = WaitingClock(work)
        use(clock, monkeypatch)
        shown = provisioner("batch", "watch", "s-1")
    assert clock.seconds == 100
    assert (shown.code, "batch resume s-1" in shown.stdout) == (0, True)


def test_a_batch_without_a_controller_is_not_watched_for_long(
    provisioner: CommandLine, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    Batches(Home(provisioner.home)).save(batch)
    use(clock := WaitingClock(), monkeypatch)
    shown = provisioner("batch", "watch", "s-1")
    assert clock.seconds == lookup.STARTING.total_seconds()
    assert (shown.code, "batch resume s-1" in shown.stdout) == (0, True)


def test_a_batch_that_the_clock_says_is_yet_to_come_is_not_waited_for(
    provisioner: CommandLine, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    Batches(Home(provisioner.home)).save(batch.model_copy(update={"created_at": AT + timedelta(hours=3)}))
    use(clock := WaitingClock(), monkeypatch)
    assert "batch resume s-1" in provisioner("batch", "watch", "s-1").stdout
    assert clock.seconds == 0
