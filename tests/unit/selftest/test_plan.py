"""Tests which steps a self-test has, and what they cost at most."""

from __future__ import annotations

from decimal import Decimal

import pytest

from provisioner.models import Destination
from provisioner.selftest.plan import TTL, steps
from provisioner.selftest.steps import run_steps
from provisioner.session import Session
from provisioner.ttl import TEARDOWN
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import told_of

DESTINATION = Destination(cidr="198.51.100.7/32", port=443)


def test_every_step_that_launches_says_what_that_costs_at_most(session: Session, cloud: FakeCloud) -> None:
    cloud.usd = Decimal("0.01")
    costs = {step.name: step.worst_micro_usd for step in steps({False: session, True: session}, DESTINATION, crowd=4)}
    one = costs["reboot"]
    assert one >= 20_000 * (TTL + TEARDOWN).total_seconds() / 3600  # the worst price is twice the usual one
    assert costs["4 at once"] == 4 * one
    assert costs["offline, with an aux VM, spot"] == 2 * costs["offline, one machine, spot"] == 2 * one
    assert costs["images"] > 0
    assert {costs[name] for name in ("controller and account", "nothing left")} == {0}


def test_the_steps_stop_where_the_controller_is_not_ready(
    session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = steps({False: session, True: session}, DESTINATION)
    assert len([step for step in planned if "spot" in step.name]) == 6
    monkeypatch.setattr(cloud, "problems", lambda: [("No credentials.", "Log in.")])
    outcome = run_steps(planned, session.progress)
    assert outcome.surprise is not None
    assert (outcome.surprise.message, outcome.surprise.hint) == ("No credentials.", "Log in.")
    assert len(outcome.results) == 1
    assert any("controller and account" in note for note in told_of(session).notes)
