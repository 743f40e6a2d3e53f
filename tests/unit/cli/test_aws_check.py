"""Tests what `aws check` asks, prints and keeps, on a fake cloud."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from provisioner.cli import aws_check
from provisioner.errors import HostError
from provisioner.models import Destination
from provisioner.selftest.steps import Step
from provisioner.session import Session
from tests.unit.conftest import CommandLine


@pytest.fixture
def planned(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Puts these steps in the place of the self-test's, on a fake cloud."""
    planned = [Step("first", "looks around", 0, lambda: "well"), Step("second", "pays", 300_000, lambda: "paid")]
    seen: list[Any] = []

    def steps(sessions: dict[bool, Session], destination: Destination) -> list[Step]:
        seen.append((sessions, destination))
        return planned

    monkeypatch.setattr(aws_check, "resolve", lambda _: (Destination(cidr="198.51.100.7/32", port=443),))
    monkeypatch.setattr(aws_check, "session", lambda where: replace(session, cloud=session.cloud))
    monkeypatch.setattr(aws_check, "steps", steps)
    return planned


@pytest.mark.usefixtures("planned")
def test_it_lists_steps_and_costs_and_begins_only_when_told_to(provisioner: CommandLine) -> None:
    done = provisioner("aws", "check")
    assert done.code == 2
    assert "  1 first: looks around (nothing)\n  2 second: pays (at most 0.3000 USD)\n" in done.stderr
    assert "All of it costs at most 0.3000 USD, and is stopped at 1 USD." in done.stderr
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


def test_a_surprise_says_what_to_do_and_what_to_send(
    provisioner: CommandLine, planned: list[Step], session: Session
) -> None:
    def refuse() -> str:
        raise HostError("123456789012 may not.", hint="Ask its owner.", details="run_instances: no")

    planned[1] = replace(planned[1], work=refuse)
    done = provisioner("aws", "check", "--yes")
    assert done.code == HostError.exit_code
    [report] = (session.home.root / "self-tests").iterdir()
    for line in (
        "Stopped at the step second: 123456789012 may not.",
        "Ask its owner.",
        "run_instances: no",
        str(report),
    ):
        assert line in done.stdout + done.stderr
    assert "123456789012" not in report.read_text()
