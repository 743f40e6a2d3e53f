"""Tests the claims on an environment: its lock, its lease, and the cost that is reserved and settled."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from provisioner.base.clock import TEARDOWN
from provisioner.base.errors import BudgetError, InfrastructureError, UsageError
from provisioner.base.models import Endpoint
from provisioner.costs.ledger import Spending
from provisioner.machines import claims
from provisioner.machines.claims import destruction_lock, environment_lock
from provisioner.session import Session
from provisioner.store.files import is_locked
from tests.unit.fakes.clock import WaitingClock
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import environment, told_of, up
from tests.waiting import BOUND_SECONDS

HOUR = timedelta(hours=1)


def test_the_worst_case_is_reserved_under_project_and_batch(session: Session, cloud: FakeCloud) -> None:
    cloud.usd = Decimal(3)
    session = replace(session, spending=Spending(command="c-1", project="p", batch="b"))
    reserved = claims.reserve(session, environment(batch="b"))
    assert reserved.worst_usd_per_hour == 6
    [entry] = session.ledger.entries(unsettled=True)
    assert (entry.command, entry.project, entry.batch, entry.region) == ("c-1", "p", "b", "crater")
    assert entry.reserved_micro_usd == 7_000_000  # an hour, and ten minutes of clean-up
    assert is_locked(session.environments.lease("env"))
    session.leases.release("env")


def test_a_launch_beyond_the_budget_leaves_no_lease_or_entry(session: Session, cloud: FakeCloud) -> None:
    cloud.usd = Decimal(3)
    session = replace(session, spending=Spending(budget=Decimal("6.99")))
    with pytest.raises(BudgetError, match="does not fit the budget given"):
        claims.reserve(session, environment())
    assert session.ledger.entries() == []
    assert not session.environments.lease("env").exists()


def test_an_interruption_after_the_reservation_settles_it(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    real = session.ledger.reserve

    def interrupted(*arguments: object) -> None:
        real(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(session.ledger, "reserve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        claims.reserve(session, environment())
    [entry] = session.ledger.entries()
    assert entry.actual_micro_usd == 0
    assert not session.environments.lease("env").exists()


@pytest.mark.parametrize(
    ("usd", "lives", "micro_usd"),
    [("0", HOUR, 0), ("6", HOUR, 7_000_000), ("6", timedelta(0), 1_000_000), ("0.000001", HOUR, 2)],
    ids=["free", "hour", "clean-up", "rounded"],
)
def test_the_worst_case_covers_the_time_to_live_and_the_clean_up(usd: str, lives: timedelta, micro_usd: int) -> None:
    new = environment()
    priced = new.model_copy(update={"worst_usd_per_hour": Decimal(usd), "expires_at": new.created_at + lives})
    assert claims.worst_cost(priced) == micro_usd


def test_an_environment_runs_until_all_machines_have_ended(session: Session, cloud: FakeCloud) -> None:
    env = up(session)
    assert claims.still_runs(session, env) is True
    cloud.faults.unreachable = True
    assert claims.still_runs(session, env) is None
    cloud.faults.unreachable = False
    cloud.end_machine(env)
    assert claims.still_runs(session, env) is False
    assert claims.still_runs(session, env.model_copy(update={"endpoints": {}})) is None


@pytest.mark.parametrize(
    ("ran", "price", "micro_usd"),
    [(True, "6", 12_000_000), (False, "6", 6_000_000), (True, "0", 0), (None, None, 14_000_000)],
    ids=["ran-on", "ended-at-its-limit", "free", "killed-while-created"],
)
def test_the_cost_of_the_time_that_it_ran_is_settled(
    session: Session, monkeypatch: pytest.MonkeyPatch, ran: bool | None, price: str | None, micro_usd: int
) -> None:
    env = claims.reserve(session, environment())
    begin = env.created_at
    monkeypatch.setattr(claims, "now", lambda: begin + 2 * HOUR)
    priced = env.model_copy(
        update={"usd_per_hour": None if price is None else Decimal(price), "worst_usd_per_hour": Decimal(12)}
    )
    claims.settle(session, priced, ran=ran)
    [entry] = session.ledger.entries()
    assert entry.actual_micro_usd == micro_usd
    assert entry.ended_at == begin + {True: 2 * HOUR, False: HOUR, None: HOUR + TEARDOWN}[ran]
    session.leases.release("env")


def test_a_clock_that_was_set_back_makes_no_life_cheap(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    env = claims.reserve(session, environment().model_copy(update={"usd_per_hour": Decimal(6)}))
    monkeypatch.setattr(claims, "now", lambda: env.created_at - 2 * HOUR)
    claims.settle(session, env, ran=True)
    [entry] = session.ledger.entries()
    assert (entry.actual_micro_usd, entry.ended_at) == (7_000_000, env.expires_at + TEARDOWN)
    session.leases.release("env")


def test_settling_without_the_shared_database_asks_for_its_url(session: Session) -> None:
    claims.settle(session, environment(shared_ledger=True), ran=True)
    assert "PROVISIONER_DATABASE" in told_of(session).notes[0]


def test_the_lease_is_renewed_only_for_existing_machines(session: Session, cloud: FakeCloud) -> None:
    renewals: list[object] = []
    new = session.environments.save(environment())
    session = replace(session, leases=RecordingLeases(renewals))  # type: ignore[arg-type]
    claims.take_lease(session, new)
    [renew] = renewals
    assert callable(renew)
    renew()
    assert cloud.renewed == []
    session.environments.update(new, endpoints={"primary": Endpoint(host="127.0.0.1", port=1)})
    renew()
    assert cloud.renewed == ["env"]


class RecordingLeases:
    """Records the callbacks that renew leases, so that a test can call them at once."""

    def __init__(self, renewals: list[object]) -> None:
        self._renewals = renewals

    def take(self, _id: str, _path: object, renew: object) -> None:
        self._renewals.append(renew)


def test_nothing_is_launched_if_the_ledger_cannot_be_used(session: Session) -> None:
    session.home.ledger.write_text("no database")
    with pytest.raises(InfrastructureError, match="cannot be used"):
        claims.reserve(session, environment())
    assert not session.environments.lease("env").exists()


def test_the_lock_is_released_at_the_end(session: Session) -> None:
    lock = session.environments.lock("env")
    with environment_lock(session, session.environments.save(environment())):
        assert is_locked(lock)
    assert not is_locked(lock)


def test_a_destroyed_environment_cannot_be_changed(session: Session) -> None:
    saved = session.environments.save(environment())
    session.environments.archive(saved)
    with pytest.raises(UsageError, match="env has been destroyed"), environment_lock(session, saved):
        raise AssertionError


@pytest.mark.parametrize("status", ["destroying", "unverified"])
def test_an_environment_that_is_ending_can_only_be_destroyed(session: Session, status: str) -> None:
    saved = session.environments.save(environment())
    ending = session.environments.update(saved, status=status)
    with pytest.raises(UsageError, match="The destruction of env has begun"), environment_lock(session, saved):
        raise AssertionError
    with destruction_lock(session, saved) as current:
        assert current == ending
        assert is_locked(session.environments.lock("env"))


def test_a_waiting_provisioner_sees_the_other_ones_changes(session: Session) -> None:
    saved = session.environments.save(environment())
    has_lock, waits, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        with environment_lock(session, saved):
            has_lock.set()
            assert waits.wait(BOUND_SECONDS)
            session.environments.update(saved, status="ready")

    told_of(session).notes = Signalling(waits)
    thread = threading.Thread(target=other)
    thread.start()
    assert has_lock.wait(BOUND_SECONDS)
    with environment_lock(session, saved) as current:
        seen.append(current.status)
    thread.join()
    assert seen == ["ready"]
    assert told_of(session).notes == ["Waiting for another provisioner that works on env"]


def test_a_destruction_needs_neither_lock_file_nor_record(session: Session) -> None:
    saved = session.environments.save(environment())
    (session.environments.directory("env") / "environment.json").write_text("{")
    session.environments.lock("env").mkdir(parents=True)
    with destruction_lock(session, saved) as current:
        assert current == saved
    [note] = told_of(session).notes
    assert note.startswith("Locking env: IsADirectoryError")


def test_a_destruction_does_not_wait_forever(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provisioner.store.files.time", WaitingClock())
    saved = session.environments.save(environment())
    with environment_lock(session, saved), destruction_lock(session, saved) as current:
        assert current == saved
    waits, goes_on = told_of(session).notes
    assert waits == "Waiting for another provisioner that works on env"
    assert goes_on == "Locking env: TimeoutError another process still holds it after 60 seconds"


class Signalling(list[str]):
    """Signals an event when something is appended."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self._event = event

    def append(self, text: str) -> None:
        super().append(text)
        self._event.set()
