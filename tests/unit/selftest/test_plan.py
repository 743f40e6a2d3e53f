"""Tests which steps a self-test has, and what they cost at most."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from provisioner.clouds.aws.instances.instance_catalogue import snapshot
from provisioner.costs.prices import micro_usd
from provisioner.family.loader import load_family
from provisioner.models import Destination
from provisioner.selftest.steps import BUDGET_USD, BUILDER_TTL, CROWD_TTL, FAMILY, LIMIT_USD, TTL, run_steps, steps
from provisioner.session import Session
from provisioner.ttl import TEARDOWN
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.ec2_prices import sell
from tests.unit.fakes.guest import SETUP as GUEST_SETUP
from tests.unit.fakes.world import store_image, told_of

AUX = {
    "cpu_count_range": [1, 2], "ram_gib_range": [0.75, 2], "cpu_architecture": "x64",
    "base_image_type": "debian-12", "build_steps": [],
}  # fmt: skip
TASKS: dict[str, Any] = {
    f"{internet}{aux}": {
        "instructions": "",
        "permissions": ["full_internet"] if internet == "online" else [],
        **({"aux_vm_spec": AUX} if aux else {}),
    }
    for internet in ("offline", "online")
    for aux in ("", "-aux")
}
SETUP = {**GUEST_SETUP, "tasks": TASKS}
DESTINATION = Destination(cidr="198.51.100.7/32", port=443)


def test_every_step_that_launches_says_what_that_costs_at_most(session: Session, cloud: FakeCloud) -> None:
    cloud.usd = Decimal("0.01")
    costs = {step.name: step.worst_micro_usd for step in steps({False: session, True: session}, DESTINATION, crowd=4)}
    one = costs["reboot"]
    in_a_crowd = costs["4 at once"] / 4
    assert one >= 20_000 * (TTL + TEARDOWN).total_seconds() / 3600  # the worst price is twice the usual one
    assert 20_000 * (CROWD_TTL + TEARDOWN).total_seconds() / 3600 <= in_a_crowd < one
    assert costs["offline, with an aux VM, spot"] == 2 * costs["offline, one machine, spot"] == 2 * one
    assert costs["images"] > 0
    assert {costs[name] for name in ("controller and account", "nothing left")} == {0}


@pytest.mark.parametrize("region", sorted(snapshot().prices))
@pytest.mark.parametrize("built", [False, True], ids=["nothing-built", "built"])
def test_the_checks_steps_cost_less_than_a_dollar(
    session: Session, cloud: FakeCloud, region: str, built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sell(cloud, region, monkeypatch)
    if built:
        store_image(session, load_family(FAMILY), SETUP)
    opened = replace(session, ttl=TTL, builder_ttl=BUILDER_TTL)
    spent = 0
    for step in steps({False: opened, True: opened}, DESTINATION):
        assert spent + step.worst_micro_usd <= micro_usd(BUDGET_USD), step.name
        assert step.usual_micro_usd <= step.worst_micro_usd
        spent += step.usual_micro_usd
    assert 0 < spent <= micro_usd(LIMIT_USD)


def test_the_steps_stop_where_the_controller_is_not_ready(
    session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = steps({False: session, True: session}, DESTINATION)
    assert len([step for step in planned if "spot" in step.name]) == 6
    monkeypatch.setattr(cloud, "problems", lambda: [("No credentials.", "Log in.")])
    outcome = run_steps(planned, session.progress)
    assert outcome.failure is not None
    assert (outcome.failure.message, outcome.failure.hint) == ("No credentials.", "Log in.")
    assert len(outcome.results) == 1
    assert any("controller and account" in note for note in told_of(session).notes)
