"""Tests an eval whose budget does not cover all of its samples at once, on a fake cloud with a mock model."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import anyio
import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import SandboxEnvironmentSpec, sandbox

from provisioner.costs.prices import MICRO
from provisioner.inspect import forks
from provisioner.inspect.sandbox import ProvisionerSandbox
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.inspect.conftest import Configured
from tests.waiting import BOUND_SECONDS

# A sample reserves 2 dollars an hour, for four hours and the teardown.
BUDGET_USD = 26


def test_a_budget_for_three_of_five_samples_has_the_others_wait(
    cloud: FakeCloud, configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.usd = Decimal(1)
    cloud.guest_defaults["programs"] = dict.fromkeys(("/bin/sh", "bash", "true"), b"")
    monkeypatch.setenv("INSPECT_ASYNC_BACKEND", "asyncio")
    monkeypatch.setattr(forks, "PAUSE_SECONDS", 0.05)
    running: set[str] = set()
    at_once: list[int] = []
    reserved_usd: list[float] = []

    @solver
    def wait_for_three() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            machines = sandbox().as_type(ProvisionerSandbox).machines
            running.add(machines.environment.id)
            entries = machines.session.ledger.entries(unsettled=True)
            at_once.append(len(running))
            reserved_usd.append(sum(entry.reserved_micro_usd for entry in entries) / MICRO)
            with anyio.fail_after(BOUND_SECONDS):
                while max(at_once) < 3:
                    await anyio.sleep(0.01)
            running.discard(machines.environment.id)
            return state

        return solve

    sandboxed = SandboxEnvironmentSpec("provisioner", configured(budget=BUDGET_USD))
    task = Task(dataset=[Sample(input=name) for name in "abcde"], solver=wait_for_three(), sandbox=sandboxed)
    [log] = eval(
        task,
        model="mockllm/model",
        max_samples=5,
        max_sandboxes=5,
        log_dir=str(tmp_path / "logs"),
        display="none",
    )
    assert (log.status, [sample.error for sample in log.samples or []]) == ("success", [None] * 5)
    assert max(at_once) == 3
    assert max(reserved_usd) <= BUDGET_USD
