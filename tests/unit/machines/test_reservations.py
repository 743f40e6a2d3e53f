"""Tests reserving the worst-case cost before a launch and settling the actual cost at the end."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from provisioner.costs.ledger import Spending
from provisioner.errors import BudgetError, InfrastructureError
from provisioner.machines import launch
from provisioner.models import Endpoint
from provisioner.session import Session
from provisioner.store.locks import is_locked
from provisioner.ttl import TEARDOWN
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import environment, told_of, up

HOUR = timedelta(hours=1)


def test_the_worst_case_is_reserved_under_project_and_batch(session: Session, cloud: FakeCloud) -> None:
    cloud.usd = Decimal(3)
    session = replace(session, spending=Spending(command="c-1", project="p", batch="b"))
    reserved = launch.reserve(session, environment(batch="b"))
    assert reserved.worst_usd_per_hour == 6
    [entry] = session.ledger.entries(unsettled=True)
    assert (entry.command, entry.project, entry.batch, entry.region) == ("c-1", "p", "b", "crater")
    assert entry.reserved_micro_usd == 7_000_000  # an hour, and ten minutes of clean-up
    assert is_locked(session.environments.lease("env"))
    session.leases.release("env")


def test_a_launch_beyond_the_budget_leaves_no_lease_or_entry(session: Session, cloud: FakeCloud) -> None:
    cloud.usd = Decimal(3)
    session = replace(session, spending=Spending(budget=Decimal("6.99")))
    with pytest.raises(BudgetError, match="does not fit --budget"):
        launch.reserve(session, environment())
    assert session.ledger.entries() == []
    assert not session.environments.lease("env").exists()


def test_an_interruption_after_the_reservation_settles_it(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    real = session.ledger.reserve

    def interrupted(*arguments: object) -> None:
        real(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(session.ledger, "reserve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch.reserve(session, environment())
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
    assert launch.worst_cost(priced) == micro_usd


def test_an_environment_runs_until_all_machines_have_ended(session: Session, cloud: FakeCloud) -> None:
    env = up(session)
    assert launch.still_runs(session, env) is True
    cloud.faults.unreachable = True
    assert launch.still_runs(session, env) is None
    cloud.faults.unreachable = False
    cloud.end_machine(env)
    assert launch.still_runs(session, env) is False
    assert launch.still_runs(session, env.model_copy(update={"endpoints": {}})) is None


@pytest.mark.parametrize(
    ("ran", "price", "micro_usd"),
    [(True, "6", 12_000_000), (False, "6", 6_000_000), (True, "0", 0), (None, None, 14_000_000)],
    ids=["ran-on", "ended-at-its-limit", "free", "killed-while-created"],
)
def test_the_cost_of_the_time_that_it_ran_is_settled(
    session: Session, monkeypatch: pytest.MonkeyPatch, ran: bool | None, price: str | None, micro_usd: int
) -> None:
    env = launch.reserve(session, environment())
    begin = env.created_at
    monkeypatch.setattr(launch, "now", lambda: begin + 2 * HOUR)
    priced = env.model_copy(
        update={"usd_per_hour": None if price is None else Decimal(price), "worst_usd_per_hour": Decimal(12)}
    )
    launch.settle(session, priced, ran=ran)
    [entry] = session.ledger.entries()
    assert entry.actual_micro_usd == micro_usd
    assert entry.ended_at == begin + {True: 2 * HOUR, False: HOUR, None: HOUR + TEARDOWN}[ran]
    session.leases.release("env")


def test_a_clock_that_was_set_back_makes_no_life_cheap(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    env = launch.reserve(session, environment().model_copy(update={"usd_per_hour": Decimal(6)}))
    monkeypatch.setattr(launch, "now", lambda: env.created_at - 2 * HOUR)
    launch.settle(session, env, ran=True)
    [entry] = session.ledger.entries()
    assert (entry.actual_micro_usd, entry.ended_at) == (7_000_000, env.expires_at + TEARDOWN)
    session.leases.release("env")


def test_settling_without_the_shared_database_asks_for_its_url(session: Session) -> None:
    launch.settle(session, environment(shared_ledger=True), ran=True)
    assert "PROVISIONER_DATABASE" in told_of(session).notes[0]


def test_the_lease_is_renewed_only_for_existing_machines(session: Session, cloud: FakeCloud) -> None:
    renewals: list[object] = []
    new = session.environments.save(environment())
    session = replace(session, leases=RecordingLeases(renewals))  # type: ignore[arg-type]
    launch.take_lease(session, new)
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
        launch.reserve(session, environment())
    assert not session.environments.lease("env").exists()
