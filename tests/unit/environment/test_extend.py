"""Tests extending the time to live: the budget is checked first, then every layer gets the new time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from provisioner.base.clock import now
from provisioner.base.errors import BudgetError, Interrupted, LivenessLostError, MachineLostError, UsageError
from provisioner.base.models import Environment
from provisioner.costs.ledger import Spending
from provisioner.environment.lifecycle import destroy, extend
from provisioner.machines import claims
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import environment, up

HOUR = timedelta(hours=1)


@pytest.fixture
def running(session: Session, cloud: FakeCloud) -> Iterator[Environment]:
    """Brings up an environment for an hour, with 7 US dollars reserved."""
    cloud.usd = Decimal(3)
    yield up(session, claims.reserve(session, environment()))
    session.leases.release("env")


def reserved(session: Session) -> int:
    [entry] = session.ledger.entries(unsettled=True)
    return entry.reserved_micro_usd


def test_every_layer_gets_the_new_time(session: Session, cloud: FakeCloud, running: Environment) -> None:
    later = extend(session, running, HOUR)
    assert later.expires_at == running.expires_at + HOUR
    assert session.environments.find("env") == later
    assert reserved(session) == 13_000_000
    assert cloud.ttls == {"env": later.expires_at}
    assert cloud.machine(running).guest.ttl_moved_to == int(later.expires_at.timestamp())


def test_an_extension_beyond_the_budget_changes_nothing(
    session: Session, cloud: FakeCloud, running: Environment
) -> None:
    poor = replace(session, spending=Spending(month=Decimal(10)))
    with pytest.raises(BudgetError, match="does not fit the budget of"):
        extend(poor, running, HOUR)
    assert session.environments.find("env").expires_at == running.expires_at
    assert reserved(session) == 7_000_000
    assert (cloud.ttls, cloud.machine(running).guest.ttl_moved_to) == ({}, None)


def test_the_budget_of_the_project_at_launch_applies(session: Session, running: Environment) -> None:
    rich = Spending(project="other", projects={"other": Decimal(0), "default": Decimal(100)})
    assert extend(replace(session, spending=rich), running, HOUR).expires_at == running.expires_at + HOUR


@pytest.mark.parametrize(
    ("change", "by", "says"),
    [
        ({"expires_at": now() - HOUR}, HOUR, "Its time to live ended"),
        ({}, timedelta(days=7), "exceed the maximum of 7d"),
        ({"status": "creating", "endpoints": {}}, HOUR, "its status is creating"),
        ({"shared_ledger": True}, HOUR, "in a database that workers share"),
    ],
    ids=["ended", "too-long", "not-up", "shared"],
)
def test_an_impossible_extension_changes_nothing(
    session: Session, cloud: FakeCloud, running: Environment, change: dict[str, object], by: timedelta, says: str
) -> None:
    before = session.environments.update(running, **change)
    with pytest.raises(UsageError, match=says):
        extend(session, running, by)
    assert session.environments.find("env") == before
    assert (reserved(session), cloud.ttls) == (7_000_000, {})


def test_a_destroyed_environment_does_not_come_back(session: Session, running: Environment) -> None:
    destroy(session, running)
    with pytest.raises(UsageError, match="env has been destroyed"):
        extend(session, running, HOUR)
    assert not session.environments.directory("env").exists()


@pytest.mark.parametrize("how", ["refuses", "gone"])
def test_a_machine_that_cannot_be_extended_is_reported(
    session: Session, cloud: FakeCloud, running: Environment, how: str
) -> None:
    if how == "refuses":
        cloud.machine(running).guest.ttl_refusal = "Unit not found"
    else:
        cloud.end_machine(running)
    with pytest.raises(MachineLostError, match="could not be extended and ends at its earlier time") as caught:
        extend(session, running, HOUR)
    assert ("Unit not found" if how == "refuses" else "no longer running") in (caught.value.details or "")
    assert session.environments.find("env").expires_at == running.expires_at + HOUR


@pytest.mark.parametrize("why", [Interrupted, LivenessLostError])
def test_an_extension_that_is_interrupted_blames_no_machine(
    session: Session, running: Environment, why: type[Exception]
) -> None:
    def check() -> None:
        raise why("stopped")

    with pytest.raises(why, match="stopped"):
        extend(replace(session, check=check), running, HOUR)
