"""What a process needs to work on a batch: its families, the place of an attempt, and what the batch costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.config import Settings
from provisioner.base.errors import HostError, MissingVariablesError, UsageError
from provisioner.batch import context as context_module
from provisioner.batch.context import BatchContext, batch_costs
from provisioner.batch.live_status import LiveStatus
from provisioner.clouds.local import host
from provisioner.costs.ledger import Ledger
from provisioner.family.manifest import Resources
from provisioner.images import build
from provisioner.machines.apply_batcher import ApplyBatcher
from provisioner.store.home import Home
from tests.unit.batch.samples import AT, entry, run, suite

FAMILY = (
    "class TaskFamily:\n    standard_version = '0.5.0'\n    @staticmethod\n    def get_tasks():\n        return {}\n"
)


class Place:
    """A cloud in one of several places."""

    name = "moon"

    def __init__(self, *regions: str) -> None:
        self.region, *self._others = regions

    def check_allowlist(self, allowed: object) -> None: ...

    def fallback(self) -> Place | None:
        return Place(*self._others) if self._others else None


def new_context(directory: Path, **changes: Any) -> BatchContext:
    (directory / "fam").mkdir()
    (directory / "fam" / "fam.py").write_text(FAMILY)
    (directory / "secrets.env").write_text("A=b\n")
    (directory / "fam" / "secrets.env").write_text("A=b\n")
    home = Home(directory / "home")
    home.make()
    return BatchContext(home, Settings(), suite(**changes), directory, "b-1")


def test_each_shortage_moves_a_run_on_to_the_next_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_module, "open_cloud", lambda *_: Place("here", "there"))
    context = new_context(tmp_path)
    one = run(family=str(tmp_path / "fam"))
    status = LiveStatus()
    batcher = ApplyBatcher("b", 1)
    with status.track("b-1/fam/main/one/1") as active_run:
        attempts = [
            context.new_attempt(context.suite, one, number, shortages, status, active_run, batcher)
            for number, shortages in ((1, 0), (2, 1), (3, 2))
        ]
        assert [attempt.session.cloud.region for attempt in attempts] == ["here", "there", "there"]
        assert active_run.attempt == 3
    assert len({attempt.id for attempt in attempts}) == 3


@pytest.mark.parametrize(("env_file", "refused"), [("secrets.env", False), ("fam/secrets.env", True)])
def test_a_family_with_the_suites_secrets_inside_is_refused(tmp_path: Path, env_file: str, refused: bool) -> None:
    context = new_context(tmp_path, env_file=env_file)
    path = str(tmp_path / "fam")
    if refused:
        with pytest.raises(UsageError):
            context.family(path)
    else:
        assert context.family(path) is context.family(path)


@pytest.mark.parametrize(
    ("families", "error", "says"),
    [
        ([{"path": "fam", "tasks": ["easy", "esay"]}], UsageError, "The family fam has no task 'esay'"),
        ([{"path": "fam"}], MissingVariablesError, "not set: TOKEN"),
    ],
    ids=["task", "variable"],
)
def test_a_run_that_cannot_begin_is_refused_before_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, families: list[Any], error: type[Exception], says: str
) -> None:
    monkeypatch.setattr(build, "family_image", lambda *_: pytest.fail("an image was built"))
    context = new_context(tmp_path, families=families)
    text = FAMILY.replace("{}", "{'easy': {}, 'hard': {}}")
    if error is MissingVariablesError:
        text += "    required_environment_variables = ['TOKEN']\n"
    (tmp_path / "fam" / "fam.py").write_text(text)
    with pytest.raises(error, match=says):
        context.prepare()


def test_a_suite_that_requires_kvm_is_refused_where_machines_would_be_emulated(tmp_path: Path) -> None:
    context = new_context(tmp_path, require_kvm=True)
    trial = {"boot": host.BOOT_ID.read_text().strip(), "works": False}
    (context.session.home.root / "kvm.json").write_text(json.dumps(trial))
    with pytest.raises(HostError, match="require_kvm"):
        context.session.cloud.choose(Resources(), None)


def test_a_batch_costs_what_is_reserved_and_what_is_spent(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for name, batch in (("one", "b-1"), ("two", "b-1"), ("other", "b-2")):
        ledger.reserve(entry(name, batch=batch, reserved_micro_usd=100))
    ledger.settle("one", AT, 30)
    assert batch_costs(ledger, "b-1") == (100, 30)
