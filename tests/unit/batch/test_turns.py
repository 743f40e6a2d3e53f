"""Runs whose machines are up ahead: they wait for their turn before start(), and nothing waits in a circle."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from provisioner.batch import attempts, turns, workflow
from provisioner.batch.results import WAITING
from provisioner.batch.turns import Turn, Turns
from provisioner.clock import now
from provisioner.clouds.findings import TerminationReason
from provisioner.costs.budgets import Spending
from provisioner.costs.ledger import Entry
from provisioner.environment import agent, lifecycle
from provisioner.errors import Interrupted
from provisioner.machines import locking
from provisioner.session import Session
from tests.unit.batch.ahead import HOUR, Batch, Case, Progress, until
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.guest import SETUP
from tests.unit.fakes.world import created, environment, family, store_image


@pytest.fixture
def batch(session: Session, cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Batch]:
    fam = family(tmp_path)
    store_image(session, fam, SETUP)
    spending = Spending(command="b-1", batch="b-1")
    batch = Batch(replace(session, ttl=HOUR, spending=spending), fam, Turns("b-1", 1))
    prepare = cloud.prepare

    def prepare_alone(*arguments: Any) -> None:
        with batch.creating:
            prepare(*arguments)

    monkeypatch.setattr(cloud, "prepare", prepare_alone)
    monkeypatch.setattr(agent, "run_agent", batch.work)
    monkeypatch.setattr(attempts, "BUDGET_POLL_SECONDS", 0.05)
    monkeypatch.setattr(workflow, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(turns, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(turns, "UNNOTICED_SECONDS", 0.01)
    yield batch
    batch.finish(1000)
    batch.wait()


def reserved_until(case: Case) -> Any:
    [entry] = case.session.ledger.entries(environment=case.attempts[-1].id)
    return entry.expires_at


def one_works_and_one_waits(batch: Batch) -> tuple[Case, Case]:
    first = batch.start(1)
    until(lambda: batch.agents)
    second = batch.start(2)
    until(lambda: second.waits)
    return first, second


def test_a_run_waits_proven_isolated_and_starts_when_its_turn_comes_with_its_whole_ttl(
    batch: Batch, cloud: FakeCloud
) -> None:
    first, second = one_works_and_one_waits(batch)
    waiting = second.record()
    guest = cloud.machine(waiting).guest
    assert guest.probe_requests
    assert guest.operations == []
    # Without probes in its record, whoever finds it after a crash may go on with its machines.
    assert (waiting.status, waiting.probes) == ("creating", ())

    batch.finish()
    until(lambda: batch.agents == [waiting.id])
    begun = second.record()
    assert begun.probes
    assert begun.expires_at > waiting.expires_at
    assert begun.expires_at == reserved_until(second) == cloud.ttls[waiting.id]
    assert guest.ttl_moved_to == int(begun.expires_at.timestamp())
    batch.finish()
    batch.wait()
    assert first.row
    assert second.row
    assert (first.row.outcome, second.row.outcome, batch.most) == ("scored", "scored", 1)
    seconds = {phase.name: phase.seconds for phase in second.row.phases}
    waited = timedelta(seconds=seconds[WAITING])
    assert timedelta(0) < begun.expires_at - waiting.expires_at <= waited + timedelta(milliseconds=1)
    assert cloud.existing() == []
    assert batch.session.ledger.entries(unsettled=True) == []


def test_a_turn_that_is_free_is_taken_at_once_and_moves_nothing(
    batch: Batch, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "UNNOTICED_SECONDS", 5.0)
    case = batch.start(1)
    batch.finish()
    batch.wait()
    assert case.row
    assert case.row.outcome == "scored"
    assert cloud.ttls == {}


def test_a_machine_that_ends_while_it_waits_is_noticed_with_the_turn_and_the_run_is_tried_again(
    batch: Batch, cloud: FakeCloud
) -> None:
    _, second = one_works_and_one_waits(batch)
    lost = second.attempts[-1].id
    cloud.ending = TerminationReason("a spot interruption")
    cloud.end_machine(lost)
    batch.finish(2)
    batch.wait()
    assert second.row
    assert (second.row.outcome, second.row.attempts) == ("scored", 2)
    assert "a spot interruption" in second.row.retried[0]
    assert cloud.machine(lost).guest.operations == []


def test_a_connection_that_broke_while_it_waited_is_opened_again(
    batch: Batch, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = one_works_and_one_waits(batch)
    cloud.machine(second.attempts[-1].id).sshd.cut()
    batch.finish(2)
    batch.wait()
    assert second.row
    assert (second.row.outcome, second.row.attempts) == ("scored", 1)


def test_a_run_whose_ttl_ends_while_it_waits_gets_a_fresh_environment_and_keeps_its_place(
    batch: Batch, cloud: FakeCloud
) -> None:
    first = batch.start(1)
    until(lambda: batch.agents)
    batch.session = replace(batch.session, ttl=timedelta(seconds=4))
    second = batch.start(2)
    until(lambda: second.waits)
    expired = second.attempts[-1].id
    second.session = replace(second.session, ttl=HOUR)
    batch.session = second.session
    third = batch.start(3)
    until(lambda: third.waits)
    until(lambda: len(second.attempts) == 2 and second.waits)
    batch.finish()
    until(lambda: first.row and batch.agents)
    assert batch.agents == [second.attempts[-1].id]  # not the third, although it had waited for longer by then
    batch.finish(2)
    batch.wait()
    assert first.row
    assert second.row
    assert third.row
    assert second.row.environment != expired
    assert "its time to live ended while it waited" in second.row.retried[0]
    assert [case.row and case.row.outcome for case in (first, second, third)] == ["scored"] * 3


def test_an_environment_that_somebody_destroys_while_it_waits_is_replaced(
    batch: Batch, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = one_works_and_one_waits(batch)
    monkeypatch.setattr(locking, "DESTRUCTION_WAIT_SECONDS", 0.1)
    gone = second.record()
    lifecycle.destroy(batch.session, gone)
    until(lambda: len(second.attempts) == 2 and second.waits)
    batch.finish(2)
    batch.wait()
    assert second.row
    assert (second.row.outcome, second.row.attempts) == ("scored", 2)
    assert second.row.retried == ("Started again: its environment is gone.",)
    assert not batch.session.environments.directory(gone.id).exists()
    assert batch.session.environments.find(gone.id, archived=True).id == gone.id


def test_a_run_that_does_not_fit_the_budget_when_its_turn_comes_waits_again_without_a_turn(
    batch: Batch, cloud: FakeCloud
) -> None:
    cloud.usd = Decimal(3)
    batch.session = replace(
        batch.session, spending=Spending(command="b-1", batch="b-1", projects={"default": Decimal(21)})
    )
    first, second = one_works_and_one_waits(batch)
    other = Entry(
        environment="other", kind="task", cloud="local", region="", family="fam", task="main", batch="b-1",
        project="default", command="b-1", launched_at=now(), expires_at=now() + HOUR, reserved_micro_usd=7_000_000,
    )  # fmt: skip
    batch.session.ledger.reserve(other)
    batch.session.ledger.extend("other", other.expires_at, 14_000_000)
    batch.finish()
    until(lambda: len(second.attempts) == 2)
    assert isinstance(second.session.progress, Progress)
    phases = second.session.progress.phases
    until(lambda: phases[-1] == "waiting for the budget...")
    # Nobody has the turn, so that others may go on, and nothing is reserved for the run.
    free = Turn(batch.turns)
    batch.turns.take(free, lambda: None)
    free.release()
    assert [entry.environment for entry in batch.session.ledger.entries(unsettled=True)] == ["other"]
    assert cloud.existing() == []
    batch.session.ledger.settle("other", now(), 0)
    batch.finish()
    batch.wait()
    assert first.row
    assert second.row
    assert (first.row.outcome, second.row.outcome, second.row.attempts) == ("scored", "scored", 2)
    assert "the budget had no room" in second.row.retried[0]


@pytest.mark.parametrize("environments", [1, 2])
def test_a_budget_for_few_environments_never_has_runs_wait_for_each_other(
    batch: Batch, cloud: FakeCloud, environments: int
) -> None:
    cloud.usd = Decimal(3)
    # Each is reserved at 7 US dollars; the cents are for what those that end have cost.
    budget = Decimal(7) * environments + Decimal("0.5")
    batch.session = replace(batch.session, spending=Spending(command="b-1", batch="b-1", budget=budget))
    batch.finish(1000)
    cases = [batch.start(number) for number in range(1, 6)]
    batch.wait()
    assert [case.row and case.row.outcome for case in cases] == ["scored"] * 5
    assert batch.most <= 1
    assert cloud.existing() == []
    assert batch.session.ledger.entries(unsettled=True) == []


@pytest.mark.parametrize("who", ["worker", "waiter"])
def test_a_run_that_is_stopped_frees_its_turn_or_its_place_in_the_line(
    batch: Batch, cloud: FakeCloud, who: str
) -> None:
    first, second = one_works_and_one_waits(batch)
    third = batch.start(3)
    until(lambda: third.waits)
    stopped, others = (first, (second, third)) if who == "worker" else (second, (first, third))
    stopped.active.stop.set()
    until(lambda: stopped.error)
    batch.finish(2)
    batch.wait()
    assert isinstance(stopped.error, Interrupted)
    assert [case.row and case.row.outcome for case in others] == ["scored"] * 2
    assert cloud.existing() == []
    assert batch.session.ledger.entries(unsettled=True) == []


def test_a_start_that_fails_frees_the_turn(batch: Batch, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = one_works_and_one_waits(batch)
    monkeypatch.setattr(
        "provisioner.environment.operations.start", lambda *_, **__: (_ for _ in ()).throw(OSError("It broke."))
    )
    batch.finish()
    batch.wait()
    assert first.row
    assert second.row
    assert (first.row.outcome, second.row.outcome) == ("scored", "infrastructure_failed")
    batch.turns.take(Turn(batch.turns), lambda: None)


def test_after_a_crash_machines_that_waited_are_proven_again_and_wait_again(batch: Batch, cloud: FakeCloud) -> None:
    first = batch.start(1)
    until(lambda: batch.agents)
    case = batch.case(2)
    identity = batch.attempt(case).id
    [left] = created(batch.session, environment(identity, full_internet=False))  # with machines, and no probes
    case = batch.start(2)
    until(lambda: case.waits)
    guest = cloud.machine(identity).guest
    assert guest.probe_requests
    assert guest.operations == []
    batch.finish(2)
    batch.wait()
    assert first.row
    assert case.row
    assert (case.row.outcome, case.row.environment, case.row.attempts) == ("scored", left.id, 1)


def test_a_run_that_is_resumed_goes_on_at_once_and_others_wait_until_there_are_few_enough(
    batch: Batch, cloud: FakeCloud
) -> None:
    first, second = one_works_and_one_waits(batch)
    resumed = Turn(batch.turns)
    resumed.resume()
    batch.finish()
    until(lambda: first.row)
    time.sleep(0.2)
    assert second.waits
    resumed.release()
    until(lambda: batch.agents)


def test_turns_are_given_in_the_order_of_arrival() -> None:
    line = Turns("b-1", 1)
    busy = Turn(line)
    line.take(busy, lambda: None)
    done: list[int] = []

    def work(number: int) -> None:
        turn = Turn(line)
        line.take(turn, lambda: None)
        done.append(number)
        turn.release()
        turn.release()  # which does nothing

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for number, thread in enumerate(threads, 1):
        thread.start()
        until(lambda: len(line._waiting) == number)  # noqa: B023
    busy.release()
    for thread in threads:
        thread.join()
    assert done == [0, 1, 2, 3, 4]


def test_a_suite_without_machines_ahead_has_no_turns(session: Session) -> None:
    turn = Turn()
    turn.resume()
    turn.release()
    known = environment()
    assert turn.wait(session, known, None) is known  # type: ignore[arg-type]
