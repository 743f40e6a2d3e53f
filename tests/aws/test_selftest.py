"""A sample of `aws check` on EC2 with real machines behind it; the campaign soak runs all of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.errors import HostError
from provisioner.base.models import Destination
from provisioner.cli import app
from provisioner.cli.commands import aws_check
from provisioner.selftest import steps
from provisioner.selftest.checks import ALL_COMBINATIONS, Combination
from provisioner.selftest.steps import Step
from provisioner.session import Session
from provisioner.store.environments import EnvironmentStore
from provisioner.store.home import Home
from tests.accelerator import accelerator
from tests.aws.ec2.fixture import OUTSIDE, REAL
from tests.homes import cache

# How many machines at once are asked for; empty for the sample, which has none.
WHOLE = os.environ.get("PROVISIONER_TEST_SELFTEST", "")
# What one of the self-test's machines takes of this host, and what the host keeps for all else.
MACHINE_GIB, KEPT_GIB = 1.0, 2.0
# Nothing else boots this combination.
SAMPLE = (Combination("allowlist", aux=True, spot=True),)
SAMPLED_STEPS = ("controller and account", "images", "rights", SAMPLE[0].name, "nothing left")
pytestmark = [pytest.mark.vm, pytest.mark.ec2, pytest.mark.timeout(14400 if WHOLE else 2400)]


@dataclass
class Ended:
    """How a command ended: its exit code and what it wrote."""

    code: int
    out: str
    err: str


Check = Callable[..., Ended]


def crowd() -> int:
    """Returns how many machines this host can run at once, of those that were asked for. A real account takes all."""
    asked = int(WHOLE)
    if REAL:
        return asked
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) / (1 << 20)
    fitting = max(1, int((free - KEPT_GIB) / MACHINE_GIB))
    return min(asked, fitting)


@pytest.fixture
def check(ec2_home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Returns `provisioner aws check`, as the command line runs it: with its time limits and its budget."""
    monkeypatch.setenv("PROVISIONER_HOME", str(ec2_home.root))
    if not REAL:  # the tests' EC2 has no DNS
        monkeypatch.setattr(aws_check, "resolve", lambda _: (OUTSIDE,))
    if WHOLE and not REAL and not accelerator(cache()).startswith("kvm"):
        # So many machines at once boot in hours here, not in minutes. Costs grow with the time.
        monkeypatch.setattr(steps, "CROWD_TTL", timedelta(hours=3))
        monkeypatch.setattr(aws_check, "BUDGET_USD", Decimal(20))
        monkeypatch.setattr(aws_check, "LIMIT_USD", Decimal(10))

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["provisioner", "aws", "check", *arguments])
        code = app.main()
        return Ended(code, *capsys.readouterr())

    return run


def test_all_steps_pass_on_a_strict_account(check: Check, ec2_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Step] = []
    announced = crowd() if WHOLE else steps.CROWD

    def sampled(sessions: dict[bool, Session], destination: Destination, **_: Any) -> list[Step]:
        every = steps.steps(sessions, destination, ALL_COMBINATIONS if WHOLE else SAMPLE, announced)
        planned.extend(step for step in every if WHOLE or step.name in SAMPLED_STEPS)
        return planned

    monkeypatch.setattr(aws_check, "steps", sampled)
    done = check("--yes", "--json")
    answer = json.loads(done.out)
    print(done.err, Path(answer["report"]).read_text(), sep="\n")
    print(f"{announced} machines at once, as many as memory allows" if WHOLE else "")
    assert done.code == 0, done.out + done.err
    assert [each["name"] for each in answer["steps"]] == [step.name for step in planned]
    assert len(planned) == (len(ALL_COMBINATIONS) + 7 if WHOLE else len(SAMPLED_STEPS))
    assert EnvironmentStore(ec2_home).all() == []


def test_a_controller_that_is_not_ready_is_the_first_failure(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISIONER_TERRAFORM", "/nowhere")
    done = check("--yes", "--json")
    assert done.code == HostError.exit_code
    assert [each["passed"] for each in json.loads(done.out)["steps"]] == [False]
