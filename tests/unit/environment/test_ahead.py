"""Tests environments that wait ahead: who gets one, and what becomes of those that nobody looks after."""

from __future__ import annotations

import threading
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from provisioner.clock import now
from provisioner.costs.budgets import Spending
from provisioner.environment import ahead
from provisioner.errors import BudgetError, IsolationError, MachineLostError, TaskError
from provisioner.family.loader import TaskFamily
from provisioner.machines.locking import environment_lock
from provisioner.models import Environment
from provisioner.session import Session
from provisioner.store.locks import is_locked
from provisioner.ttl import MAX_TTL
from tests.unit.environment.pools import another, up, waiting
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.guest import Fails
from tests.unit.fakes.probes import honest_answers
from tests.unit.fakes.world import environment, told_of

HOUR = timedelta(hours=1)


@pytest.fixture
def holder(session: Session) -> Session:
    """The session of a command that keeps environments ahead."""
    return another(session, "holder")


def test_one_that_waits_is_proven_isolated_and_has_not_started(
    holder: Session, cloud: FakeCloud, fam: TaskFamily
) -> None:
    ready = waiting(holder, fam)
    assert ready == holder.environments.find(ready.id)
    assert (ready.status, ready.attended, ready.probes, ready.started_at) == ("ahead", True, (), None)
    assert [phase.name for phase in ready.phases] == ["create", "boot", "isolation"]
    assert ready.expires_at - ready.created_at == ahead.TTL
    assert cloud.guest().probe_requests
    assert cloud.guest().operations == []
    assert is_locked(holder.environments.lease(ready.id))
    assert not is_locked(holder.environments.lock(ready.id))
    [entry] = holder.ledger.entries(unsettled=True)
    assert (entry.environment, entry.command, entry.expires_at) == (ready.id, "holder", ready.expires_at)
    text = (holder.environments.directory(ready.id) / "environment.json").read_text()
    assert "s3cret-value" not in text


def test_whoever_asks_for_the_same_gets_it_without_a_new_machine_and_with_a_ttl_and_budget_of_its_own(
    session: Session, holder: Session, cloud: FakeCloud, fam: TaskFamily
) -> None:
    cloud.usd = Decimal(3)
    ready = waiting(holder, fam)
    asker = another(session, "asker", ttl=2 * HOUR)
    before = now()
    got = up(asker, fam)
    assert (got.id, got.status, got.attended) == (ready.id, "ready", False)
    assert got == session.environments.find(ready.id)
    assert cloud.runs() == [f"apply {ready.id}"]
    assert [phase.name for phase in got.phases] == ["images", "boot", "isolation", "start"]
    assert len(cloud.guest().probe_requests) == 2
    assert cloud.guest().operations == ["start", "settle_home"]
    assert got.probes
    assert timedelta(0) <= got.expires_at - before - 2 * HOUR < timedelta(minutes=1)
    assert cloud.ttls == {got.id: got.expires_at}
    assert cloud.guest().ttl_moved_to == int(got.expires_at.timestamp())
    [entry] = session.ledger.entries()
    assert (entry.command, entry.expires_at, entry.launched_at) == ("asker", got.expires_at, ready.created_at)
    assert any(ready.id in note for note in told_of(asker).notes)


@pytest.mark.parametrize("different", ["options", "variables"])
def test_whoever_asks_for_something_else_gets_a_new_one(
    session: Session, holder: Session, cloud: FakeCloud, fam: TaskFamily, different: str
) -> None:
    ready = waiting(holder, fam)
    variables = {"TOKEN": "another"} if different == "variables" else session.variables
    options = {"templates": False} if different == "options" else {}
    got = up(another(session, variables=variables), fam, **options)
    assert got.id != ready.id
    assert got.ahead_for == ""
    assert session.environments.find(ready.id) == ready
    assert cloud.machine(ready).guest.operations == []


def test_two_who_ask_at_once_never_get_the_same(
    session: Session, holder: Session, cloud: FakeCloud, fam: TaskFamily
) -> None:
    ready = waiting(holder, fam)
    got: list[Environment] = []
    together = threading.Barrier(3)

    def ask(number: int) -> None:
        asker = another(session, f"asker-{number}")
        together.wait()
        got.append(up(asker, fam))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({each.id for each in got}) == 3
    assert ready.id in {each.id for each in got}
    assert [each.status for each in got] == ["ready"] * 3
    assert cloud.machine(ready).guest.operations == ["start", "settle_home"]


def test_nobody_waits_for_one_in_which_anothers_start_runs(
    session: Session, holder: Session, cloud: FakeCloud, fam: TaskFamily
) -> None:
    ready = waiting(holder, fam)
    begun, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        assert go_on.wait(60)

    cloud.machine(ready).guest.during["start"] = hang
    first: list[Environment] = []
    thread = threading.Thread(target=lambda: first.append(up(another(session), fam)))
    thread.start()
    try:
        assert begun.wait(60)
        assert up(another(session), fam).id != ready.id
        ahead.remove_abandoned(session, lambda _: session)
        holder.leases.release(ready.id)  # who kept it ahead has noticed, or has died
        ahead.remove_abandoned(session, lambda _: session)
    finally:
        go_on.set()
        thread.join()
    assert [each.id for each in first] == [ready.id]


def test_one_whose_end_is_being_moved_is_waited_for(
    session: Session, holder: Session, cloud: FakeCloud, fam: TaskFamily
) -> None:
    ready = waiting(holder, fam)
    got: list[Environment] = []
    with environment_lock(holder, ready):
        thread = threading.Thread(target=lambda: got.append(up(another(session), fam)))
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
    thread.join()
    assert [each.id for each in got] == [ready.id]


def test_one_whose_holder_works_on_it_for_long_is_left_alone(
    session: Session, holder: Session, fam: TaskFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "BUSY_SECONDS", 0.2)
    ready = waiting(holder, fam)
    with environment_lock(holder, ready):
        assert up(another(session), fam).id != ready.id


def test_one_whose_machine_has_ended_is_replaced_by_a_new_one(
    session: Session, holder: Session, cloud: FakeCloud, fam: TaskFamily
) -> None:
    ready = waiting(holder, fam)
    cloud.end_machine(ready)
    asker = another(session)
    got = up(asker, fam)
    assert (got.id != ready.id, got.status) == (True, "ready")
    assert not session.environments.exists(ready.id)
    assert [entry.environment for entry in session.ledger.entries(unsettled=True)] == [got.id]
    assert any(note.startswith(f"Destroying {ready.id}") for note in told_of(asker).notes)


def test_one_whose_end_cannot_be_moved_is_replaced_by_a_new_one(
    session: Session, holder: Session, cloud: FakeCloud, fam: TaskFamily
) -> None:
    ready = waiting(holder, fam)
    cloud.guest().ttl_refusal = "no timer"
    assert up(another(session), fam).id != ready.id
    assert not session.environments.exists(ready.id)


def _leak(request: dict[str, Any]) -> bytes:
    return honest_answers(request).replace(b'"not reached"', b'"reached"', 1)


@pytest.mark.parametrize("broken", ["isolation", "start", "lost"])
def test_what_no_longer_keeps_its_promise_or_fails_to_start_is_destroyed_and_the_error_told(
    session: Session, holder: Session, cloud: FakeCloud, fam: TaskFamily, broken: str
) -> None:
    ready = waiting(holder, fam)
    guest = cloud.guest()
    error: type[Exception] = TaskError
    if broken == "isolation":
        guest.probes, error = _leak, IsolationError
    elif broken == "start":
        guest.values["start"] = Fails("no flag")
    else:
        guest.during["start"], error = (lambda: cloud.end_machine(ready)), MachineLostError
    with pytest.raises(error):
        up(another(session), fam)
    assert cloud.existing() == []
    assert session.environments.all() == []
    assert session.ledger.entries(unsettled=True) == []


def test_one_that_does_not_fit_the_askers_budget_goes_on_waiting(
    session: Session, holder: Session, cloud: FakeCloud, fam: TaskFamily
) -> None:
    cloud.usd = Decimal(3)
    ready = waiting(holder, fam)
    with pytest.raises(BudgetError):
        up(another(session, spending=Spending(command="asker", budget=Decimal(1))), fam)
    assert session.environments.find(ready.id) == ready
    [entry] = session.ledger.entries(unsettled=True)
    assert (entry.command, entry.expires_at) == ("holder", ready.expires_at)


def test_what_a_dead_command_kept_is_nobodys_and_removed_by_the_next(
    session: Session, holder: Session, cloud: FakeCloud, fam: TaskFamily
) -> None:
    ready = waiting(holder, fam)
    ahead.remove_abandoned(session, lambda _: session)
    assert cloud.existing() == [f"{ready.id}/primary"]
    holder.leases.release(ready.id)  # as the kernel does
    assert up(another(session), fam).id != ready.id
    ahead.remove_abandoned(session, lambda _: session)
    assert not session.environments.exists(ready.id)
    assert f"{ready.id}/primary" not in cloud.existing()
    assert ready.id not in {entry.environment for entry in session.ledger.entries(unsettled=True)}


@pytest.mark.parametrize("status", ["creating", "destroying"])
def test_what_was_cut_short_when_it_was_made_claimed_or_destroyed_is_removed(
    session: Session, holder: Session, cloud: FakeCloud, fam: TaskFamily, status: str
) -> None:
    ready = waiting(holder, fam)
    session.environments.update(ready, status=status, expires_at=now() + HOUR)
    holder.leases.release(ready.id)
    ahead.remove_abandoned(session, lambda _: session)
    assert cloud.existing() == []
    assert session.environments.all() == []


def test_what_cannot_be_removed_stops_nothing(
    session: Session, holder: Session, cloud: FakeCloud, fam: TaskFamily
) -> None:
    ready = waiting(holder, fam)
    holder.leases.release(ready.id)
    cloud.faults.stuck = True
    cloud.terraform_fails("destroy")
    ahead.remove_abandoned(session, lambda _: session)
    assert session.environments.find(ready.id).status == "destroying"
    assert any(note.startswith(f"Removing {ready.id}: ") for note in told_of(session).notes)


@pytest.mark.parametrize(
    ("changes", "gone"),
    [
        ({"status": "ahead"}, True),
        ({"status": "creating"}, True),
        ({"status": "ready"}, False),
        ({"status": "unverified"}, False),
        ({"status": "creating", "ahead_for": ""}, False),
    ],
    ids=["waits", "claimed", "ready", "unverified", "asked-for"],
)
def test_only_what_was_launched_ahead_and_reached_nobody_is_abandoned(changes: dict[str, Any], gone: bool) -> None:
    assert ahead.abandoned(environment(**{"ahead_for": "r", **changes})) is gone


def test_a_launch_that_fails_leaves_nothing(holder: Session, cloud: FakeCloud, fam: TaskFamily) -> None:
    cloud.guest_defaults = {"probes": _leak}
    with pytest.raises(IsolationError):
        waiting(holder, fam)
    assert cloud.existing() == []
    assert holder.environments.all() == []
    assert holder.ledger.entries(unsettled=True) == []


@pytest.mark.parametrize(
    ("changes", "ttl", "serves"),
    [
        ({}, HOUR, True),
        ({"status": "creating"}, HOUR, False),
        ({"status": "ready"}, HOUR, False),
        ({"ahead_for": "other"}, HOUR, False),
        ({"expires_at": now() + ahead.LEAST_LEFT - timedelta(seconds=5)}, HOUR, False),
        ({}, MAX_TTL, True),
        ({"created_at": now() - HOUR}, MAX_TTL, False),
    ],
    ids=["serves", "claimed", "ready", "other", "too-late", "longest", "too-old"],
)
def test_one_serves_while_it_waits_and_only_what_it_was_launched_for(
    changes: dict[str, Any], ttl: timedelta, serves: bool
) -> None:
    record = environment(**{"status": "ahead", "ahead_for": "mine", **changes})
    at = record.created_at if ttl == MAX_TTL and not changes else now()
    assert ahead.may_serve(record, "mine", at, ttl) is serves


def test_one_that_reached_its_operator_meanwhile_is_not_taken_for_abandoned(
    session: Session, fam: TaskFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = another(session, "holder")
    first = waiting(holder, fam)
    other = another(session)
    readable, got = other.environments.readable, list[Environment]()

    def late() -> Any:
        records = readable()
        if not got:
            got.append(up(another(session), fam))
            holder.leases.release(first.id)
        return records

    monkeypatch.setattr(other.environments, "readable", late)
    ahead.remove_abandoned(other, lambda _: other)
    assert [environment.id for environment in got] == [first.id]
    assert session.environments.exists(first.id)
