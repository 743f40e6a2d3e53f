"""Has Inspect's sandboxes use a fake cloud, and a home of the test's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from provisioner.costs.ledger import Spending
from provisioner.inspect import blocking, clean_up, compose, sample
from provisioner.inspect.configuration import Configuration
from provisioner.inspect.machine_family import TASK
from provisioner.machines import apply_batcher
from tests import homes
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.guest import SETUP
from tests.unit.fakes.world import family

Configured = Callable[..., Configuration]


@pytest.fixture(autouse=True)
def debians_compose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has compose files read by Debian's Compose, whatever this computer has, and notes of them said again."""
    monkeypatch.setattr(compose, "program", lambda _home: homes.compose())
    monkeypatch.setattr(blocking, "SAID", deque(maxlen=blocking.SAID.maxlen))


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def configured(cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configured:
    """Returns a function that makes the configuration of a family's task on the fake cloud."""
    monkeypatch.setenv("PROVISIONER_HOME", str(cloud.home.root))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(sample, "shared_cloud", lambda *_: cloud)
    monkeypatch.setattr(clean_up, "open_cloud", lambda *_: cloud)
    monkeypatch.setattr(apply_batcher, "GATHERING_SECONDS", 0.05)
    batcher = apply_batcher.ApplyBatcher("inspect", 1)
    monkeypatch.setattr(sample, "apply_batcher", lambda: batcher)
    spending: dict[object, Spending] = {}

    def process_spending(budget: object) -> Spending:
        return spending.setdefault(budget, Spending.model_validate({"budget": budget}))

    monkeypatch.setattr(sample, "process_spending", process_spending)
    tasks = {"main": {"instructions": "Do it."}, TASK: {"instructions": ""}}
    cloud.guest_defaults = {"values": {"setup": {**SETUP, "tasks": tasks}}}
    return partial(Configuration, family=str(family(tmp_path).directory), task="main")
