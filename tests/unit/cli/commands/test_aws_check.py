"""Tests what `aws check` asks, prints and keeps, on a fake cloud."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from provisioner.base.clock import now
from provisioner.base.errors import BudgetError, HostError
from provisioner.base.models import Destination, Environment
from provisioner.cli.commands import aws_check
from provisioner.costs.ledger import Spending
from provisioner.environment import lifecycle
from provisioner.family.loader import load_family
from provisioner.selftest import steps
from provisioner.selftest.steps import Step
from provisioner.session import Session
from provisioner.store.environments import new_id
from tests.unit.batch.samples import entry
from tests.unit.conftest import CommandLine
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.ec2_prices import sell
from tests.unit.fakes.world import store_image
from tests.unit.selftest.test_steps import SETUP
from tests.waiting import BOUND_SECONDS


@pytest.fixture
def planned(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Puts these steps in the place of the self-test's, on a fake cloud."""
    planned = [
        Step("first", "looks around", 0, lambda: "well"),
        Step("second", "pays", 300_000, lambda: "paid", 100_000),
    ]
    seen: list[Any] = []

    def steps(sessions: dict[bool, Session], destination: Destination) -> list[Step]:
        seen.append((sessions, destination))
        return planned

    monkeypatch.setattr(aws_check, "resolve", lambda _: (Destination(cidr="198.51.100.7/32", port=443),))
    monkeypatch.setattr(aws_check, "session", lambda where: replace(session, spending=Spending()))
    monkeypatch.setattr(aws_check, "steps", steps)
    return planned


@pytest.mark.usefixtures("planned")
def test_it_lists_steps_and_costs_and_begins_only_when_told_to(provisioner: CommandLine) -> None:
    done = provisioner("aws", "check")
    assert done.code == 2
    assert (
        "  1 first: looks around (nothing)\n  2 second: pays (usually 0.1000 USD, at most 0.3000 USD)\n" in done.stderr
    )
    assert "All of it usually costs 0.1000 USD. No step begins that would usually take it over 1 USD." in done.stderr
    assert "all that running machines may still cost, never exceeds 2 USD" in done.stderr
    assert "--yes begins without asking" in done.stderr
    assert "of 2, first" not in done.stderr


@pytest.mark.usefixtures("planned")
def test_a_self_test_that_passes_keeps_a_report(provisioner: CommandLine, session: Session) -> None:
    answer = provisioner("aws", "check", "--yes", "--json")
    assert answer.code == 0
    assert (answer.json["passed"], [each["name"] for each in answer.json["steps"]]) == (True, ["first", "second"])
    [report] = (session.home.root / "self-tests").iterdir()
    assert answer.json["report"] == str(report)
    assert "first: well" in report.read_text()


def test_a_failure_says_what_to_do_and_what_to_send(
    provisioner: CommandLine, planned: list[Step], session: Session
) -> None:
    def refuse() -> str:
        raise HostError("123456789012 may not.", hint="Ask its owner.", details="run_instances: no")

    planned[1] = replace(planned[1], work=refuse)
    done = provisioner("aws", "check", "--yes")
    assert done.code == HostError.exit_code
    [report] = (session.home.root / "self-tests").iterdir()
    for line in ("Stopped at the step second: 123456789012 may not.", "Ask its owner.", "run_instances: no"):
        assert line in done.stdout
    assert str(report) in done.stdout
    assert "123456789012" not in report.read_text()


@pytest.mark.campaign  # thirty SSH servers and their clients in one process
def test_thirty_machines_fit_beside_the_steps_before(
    provisioner: CommandLine, cloud: FakeCloud, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    sell(cloud, "us-east-1", monkeypatch)
    cloud.guest_defaults = {"values": {"start": None, "settle_home": None, "score": 1.0}}
    store_image(session, load_family(steps.FAMILY), SETUP)
    reserved: list[int] = []
    failures: list[BaseException] = []
    at_once = threading.Barrier(steps.CROWD)
    launch = lifecycle.launch

    def launch_and_wait(opened: Session, *rest: Any) -> Environment:
        try:
            launched = launch(opened, *rest)
        except BaseException as error:
            failures.append(error)
            at_once.abort()
            raise
        at_once.wait(BOUND_SECONDS)
        reserved.append(sum(entry.counted_micro_usd for entry in opened.ledger.entries()))
        at_once.wait(BOUND_SECONDS)
        return launched

    def last_steps(sessions: dict[bool, Session], destination: Destination) -> list[Step]:
        planned = steps.steps(sessions, destination)
        spent = sum(step.usual_micro_usd for step in planned[:-2])
        spend(sessions[True], spent)  # both sessions spend from one budget
        return planned[-2:]

    monkeypatch.setattr(aws_check, "resolve", lambda _: (Destination(cidr="198.51.100.7/32", port=443),))
    monkeypatch.setattr(aws_check, "session", lambda where: replace(session, spending=Spending()))
    monkeypatch.setattr(aws_check, "steps", last_steps)
    monkeypatch.setattr(lifecycle, "launch", launch_and_wait)
    done = provisioner("aws", "check", "--yes")
    assert not failures  # the others say no more than that they waited for it in vain
    assert done.code == 0, done.stdout + done.stderr
    assert len(reserved) == steps.CROWD
    assert 1_000_000 < max(reserved) <= 2_000_000


@pytest.mark.usefixtures("planned")
def test_each_run_has_a_budget_of_its_own(provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(sessions: dict[bool, Session], _: Destination) -> list[Step]:
        return [
            Step("first", "pays", 1_000_000, lambda: spend(sessions[False], 700_000), 700_000),
            Step("second", "pays", 200_000, lambda: "paid", 200_000),
        ]

    monkeypatch.setattr(aws_check, "steps", steps)
    for _ in range(2):
        done = provisioner("aws", "check", "--yes")
        assert done.code == 0, done.stdout + done.stderr


def test_no_step_begins_that_would_take_it_over_a_dollar(
    provisioner: CommandLine, planned: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps(sessions: dict[bool, Session], _: Destination) -> list[Step]:
        return [replace(planned[0], work=lambda: spend(sessions[False], 950_000)), planned[1]]

    monkeypatch.setattr(aws_check, "steps", steps)
    done = provisioner("aws", "check", "--yes")
    assert done.code == BudgetError.exit_code
    assert (
        "have cost 0.9500 USD, and this one usually costs 0.1000 USD: more than 1.0000 USD" in done.stdout + done.stderr
    )


def spend(opened: Session, micro_usd: int) -> str:
    """Writes into the ledger what an environment of a session has cost."""
    opened.ledger.reserve(
        entry(
            new_id("selftest", "before"), now(), command=opened.spending.command, reserved_micro_usd=micro_usd,
            ended_at=now(), actual_micro_usd=micro_usd,
        )
    )  # fmt: skip
    return "spent"
