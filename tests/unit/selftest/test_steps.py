"""Tests the steps of a self-test: what they cost, that the first failure ends it, and the report for strangers."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from provisioner.base.clock import TEARDOWN
from provisioner.base.errors import HostError
from provisioner.base.models import Destination
from provisioner.clouds.aws.catalogue import snapshot
from provisioner.costs.prices import micro_usd
from provisioner.family.loader import load_family
from provisioner.selftest.steps import (
    BUDGET_USD,
    BUILDER_TTL,
    CROWD_TTL,
    FAMILY,
    LIMIT_USD,
    TTL,
    Outcome,
    Step,
    StepResult,
    report,
    run_steps,
    steps,
    without_names,
)
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.ec2_prices import sell
from tests.unit.fakes.guest import SETUP as GUEST_SETUP
from tests.unit.fakes.world import Told, store_image, told_of


def test_each_step_is_announced_with_its_cost_before_it_runs() -> None:
    told = Told()
    heard: list[int] = []

    def look() -> str:
        heard.append(len(told.notes))
        return "all is well"

    outcome = run_steps([Step("first", "looks", 0, look), Step("second", "pays", 12_300, look, 4_500)], told)
    assert heard == [1, 3]
    assert told.notes[0] == "1 of 2, first: looks (costs nothing)"
    assert told.notes[2] == "2 of 2, second: pays (costs usually 0.0045 USD, at most 0.0123 USD)"
    assert outcome.failure is None
    assert [(each.name, each.found, each.passed) for each in outcome.results] == [
        ("first", "all is well", True),
        ("second", "all is well", True),
    ]


def test_the_first_failure_ends_it() -> None:
    begun: list[str] = []

    def refuse() -> str:
        begun.append("second")
        raise HostError("You may not.", hint="Ask.")

    steps = [
        Step("first", "works", 0, lambda: "well"),
        Step("second", "fails", 0, refuse),
        Step("third", "is not reached", 0, refuse),
    ]
    outcome = run_steps(steps, Told())
    assert begun == ["second"]
    assert [(each.name, each.found, each.passed) for each in outcome.results][1:] == [("second", "You may not.", False)]
    assert isinstance(outcome.failure, HostError)


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


def test_the_report_has_the_facts_the_steps_and_the_failure() -> None:
    done = StepResult(name="images", found="built", seconds=61.5, passed=True)
    failed = StepResult(name="rights", found="You may not.", seconds=1, passed=False)
    failure = HostError("You may not.", hint="Ask.", details="run_instances: no\x1b[2J")
    text = report(Outcome((done, failed), failure), {"region": "us-east-1"})
    assert text.splitlines()[:4] == [
        "region: us-east-1",
        "",
        "passed   61.5 s  images: built",
        "FAILED    1.0 s  rights: You may not.",
    ]
    assert "HostError, exit code 3: You may not.\nAsk.\nrun_instances: no" in text
    assert "\x1b" not in text


def test_it_names_no_account_user_key_or_public_address() -> None:
    said = (
        "arn:aws:iam::123456789012:user/alice may not, in 123456789012 with AKIAIOSFODNN7EXAMPLE from 203.0.113.9/32; "
        "i-0123456789abcdef0 and 10.215.0.4 stay"
    )
    assert without_names(said) == (
        "ARN may not, in ACCOUNT with KEY from ADDRESS/32; i-0123456789abcdef0 and 10.215.0.4 stay"
    )
