"""Evals on the account of many (tests/aws/loopback.py), with the family in the directory that the environment names."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import SandboxEnvironmentSpec, sandbox

from provisioner.inspect.configuration import Configuration
from tests.inspect.evals import FLAG


def _sample(identity: str, budget: float | None = None) -> Sample:
    family = str(Path(os.environ[FLAG]) / "many")
    configuration = Configuration(cloud="aws", region="us-east-1", family=family, task="main", budget=budget)
    return Sample(id=identity, input="x", sandbox=SandboxEnvironmentSpec("provisioner", configuration))


@solver
def wait_until_seen() -> Solver:
    """Works until the test has looked, as a file in the same directory says."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        assert (await sandbox().exec(["true"])).success
        while not (Path(os.environ[FLAG]) / "seen").exists():
            await anyio.sleep(0.2)
        return state

    return solve


@task
def three_at_once() -> Task:
    """Three samples of one configuration."""
    return Task(dataset=[_sample(name) for name in ("a", "b", "c")], solver=wait_until_seen())


@task
def refused() -> Task:
    """One sample that its budget has no room for, and one that only the account can refuse."""
    return Task(dataset=[_sample("budget", 0.0001), _sample("account")], solver=wait_until_seen())
