"""What is made of the reservations of attempts that no process attends; test_attempt.py shows more."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from provisioner.base.clock import TEARDOWN, now
from provisioner.base.errors import InfrastructureError
from provisioner.batch import attempt
from provisioner.session import Session
from tests.unit.batch.samples import entry
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import created, environment

HOUR = timedelta(hours=1)


def reserve(session: Session, name: str, *, launched: timedelta = timedelta(0), left: timedelta = HOUR) -> None:
    session.ledger.reserve(entry(name, now() - launched, expires_at=now() + left))


def test_a_ledger_that_cannot_be_asked_does_not_cost_the_score(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise InfrastructureError("It restarts.")

    monkeypatch.setattr(attempt, "LEDGER_PAUSES", (0.0,))
    monkeypatch.setattr(type(session.ledger), "entries", fail)
    costs = attempt.costs(session, ["env"])
    assert (costs.micro_usd, costs.cost_error) == (0, "It restarts.")


def test_an_orphan_is_settled_once_its_terraform_has_ended(session: Session) -> None:
    reserve(session, "young")
    reserve(session, "old", launched=attempt.MAX_CREATION)
    for name in ("young", "old"):
        attempt.settle_orphan(session, name, wait=False)
    assert [entry.environment for entry in session.ledger.entries(unsettled=True)] == ["young"]


def test_an_orphan_whose_launch_lies_ahead_is_not_waited_for_longer(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("provisioner.base.signals.wait", lambda seconds, _: waits.append(seconds))
    reserve(session, "env", launched=-3 * HOUR, left=4 * HOUR)
    attempt.settle_orphan(session, "env", wait=True)
    assert waits == [attempt.MAX_CREATION.total_seconds()]
    assert session.ledger.entries(unsettled=True) == []


def test_an_environment_that_this_home_still_has_is_no_orphan(session: Session, cloud: FakeCloud) -> None:
    reserve(session, "env", launched=attempt.MAX_CREATION)
    created(session, environment("env"))
    attempt.settle_orphan(session, "env", wait=False)
    assert len(session.ledger.entries(unsettled=True)) == 1
    assert cloud.existing() == ["env/primary"]


def test_only_what_others_may_still_cost_is_waited_for(session: Session) -> None:
    reserve(session, "mine")
    reserve(session, "expired", launched=HOUR, left=-TEARDOWN)
    assert not attempt.others_have_reservations(session, "b-1", "mine")
    reserve(session, "other")
    assert attempt.others_have_reservations(session, "b-1", "mine")
    assert not attempt.others_have_reservations(session, "b-2", "mine")


def test_an_end_that_no_clock_reaches_is_still_compared(session: Session) -> None:
    """Whoever may write into a shared ledger may write the last moment that a time can have."""
    reserve(session, "forged", launched=HOUR)
    session.ledger.extend("forged", datetime.max.replace(tzinfo=UTC), 1000)
    assert attempt.others_have_reservations(session, "b-1", "mine")
