"""Tests that an image can be built while Inspect makes its tasks, which keeps its event loop waiting."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from decimal import Decimal
from pathlib import Path

import pytest

from provisioner.errors import UsageError
from provisioner.family.loader import TaskFamily
from provisioner.images import build
from provisioner.inspect import task_family
from provisioner.inspect.failures import PreparationError
from provisioner.inspect.origin import Origin
from provisioner.inspect.sample import SampleMachines
from provisioner.inspect.task_family import FamilySamples
from provisioner.session import Session
from provisioner.signals import SIGNALS
from tests.unit.conftest import CommandLine
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.inspect.conftest import Configured


def test_ctrl_c_ends_a_build_that_keeps_the_event_loop_waiting(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = Path(configured().family)
    cleaned: list[str] = []

    def interrupted(session: Session, _family: TaskFamily) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
            pytest.fail("Ctrl-C was ignored")
        finally:
            with session.shield():
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
                cleaned.append("all of it")

    monkeypatch.setattr(build, "family_image", interrupted)

    async def make_the_task() -> None:
        before, hook = [signal.getsignal(number) for number in SIGNALS], sys.unraisablehook
        with pytest.raises(KeyboardInterrupt):
            FamilySamples(family, "", "local", "")
        assert [signal.getsignal(number) for number in SIGNALS] == before
        assert sys.unraisablehook == hook

    asyncio.run(make_the_task())
    assert cleaned == ["all of it"]


def test_secrets_inside_the_family_are_refused_before_a_build(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = Path(configured().family)
    (family / "secrets.env").write_text("KEY=value\n")
    monkeypatch.setattr(build, "family_image", lambda *_: pytest.fail("an image was built"))
    with pytest.raises(PreparationError, match="Move it out of the family"):
        FamilySamples(family, str(family / "secrets.env"), "local", "")


def test_a_hint_is_told_before_the_image_is_built_too(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise UsageError("The settings are not valid.", hint="Mend them.")

    monkeypatch.setattr(task_family, "open_session", refuse)
    with pytest.raises(PreparationError) as raised:
        FamilySamples(Path(configured().family), "", "local", "")
    assert str(raised.value) == "The settings are not valid.\nMend them."


def test_missing_secrets_are_told_with_inspects_argument(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = Path(configured().family)
    module = family / f"{family.name}.py"
    start = "    required_environment_variables = ['TOKEN']\n"
    module.write_text(module.read_text().replace("class TaskFamily:\n", f"class TaskFamily:\n{start}"))
    monkeypatch.setattr(build, "family_image", lambda *_: pytest.fail("an image was built"))
    with pytest.raises(PreparationError) as raised:
        FamilySamples(family, "", "local", "")
    assert "not set: TOKEN" in str(raised.value)
    assert "-T secrets_env_path=FILE" in str(raised.value)
    assert "--env-file" not in str(raised.value)


def test_unknown_tasks_are_told_before_the_image_is_built(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "family_image", lambda *_: pytest.fail("an image was built"))
    with pytest.raises(PreparationError, match=r"fam has no task other, mainn\. It has main"):
        FamilySamples(Path(configured().family), "", "local", "", ["main", "other", "mainn"])


def test_costs_show_a_familys_image_by_family_and_apart_from_the_eval(
    cloud: FakeCloud, configured: Configured, provisioner: CommandLine
) -> None:
    cloud.usd = Decimal(1)
    given = configured()
    name = Path(given.family).name
    FamilySamples(Path(given.family), "", "local", "")
    sample = SampleMachines(given, Origin("task", "of-eval", "1"))
    sample.bring_up()
    sample.destroy()
    by_batch = provisioner("costs", "--by", "batch", "--json").json["totals"]
    assert [(each["group"], each["launches"]) for each in by_batch] == [("inspect-images", 1), ("inspect-of-eval", 1)]
    assert all(each["actual_usd"] > 0 for each in by_batch)
    said = provisioner("costs", "--by", "family", "--json").json
    assert {each["group"]: each["launches"] for each in said["totals"]}[name] == 2
    kinds = [(each["kind"], each["task"]) for each in said["entries"] if each["family"] == name]
    assert kinds == [("builder", None), ("task", "main")]
    # The builder and the samples share the process's budget.
    assert len({each["command"] for each in said["entries"]}) == 1
