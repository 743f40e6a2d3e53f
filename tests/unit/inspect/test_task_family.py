"""Tests what Inspect's log keeps of the tasks of families, under METR's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from inspect_ai import Task
from inspect_ai._eval.loader import load_tasks, resolve_task_args
from inspect_ai._util.config import parse_cli_args

from provisioner.images import build
from provisioner.inspect import entry_points
from provisioner.inspect.configuration import Configuration
from provisioner.inspect.failures import PreparationError
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.guest import SETUP
from tests.unit.inspect.conftest import Configured


def _only(tasks: list[Task]) -> Task:
    [task] = tasks
    return task


@pytest.fixture
def fam(configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A family, below the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fam" / "manifest.yaml").write_text(json.dumps({"version": "2.1.3", "tasks": {}}))
    return tmp_path / "fam"


def test_a_logs_arguments_make_the_task_again(fam: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secrets.env").write_text("KEY=value\n")
    arguments = {"family": "fam", "task": "main", "secrets_env_path": "secrets.env"}
    kept = resolve_task_args(_only(load_tasks(["provisioner/task_family"], arguments)))
    assert kept == {"family": str(fam), "task": "main", "secrets_env_path": str(tmp_path / "secrets.env")}
    monkeypatch.chdir("/")
    again = _only(load_tasks(["provisioner/task_family"], kept))
    assert [sample.id for sample in again.dataset] == ["main"]


def test_a_familys_epochs_are_forked_if_its_argument_says_so(fam: Path) -> None:
    [sample] = entry_points.task_family(family=str(fam), task="main", fork="epochs").dataset
    assert sample.sandbox is not None
    assert isinstance(sample.sandbox.config, Configuration)
    assert sample.sandbox.config.fork == "epochs"
    with pytest.raises(PreparationError, match="cannot be frozen"):
        entry_points.task_family(family=str(fam), fork="epochs", cloud="aws")


def test_an_argument_bounds_what_samples_cost(fam: Path, tmp_path: Path) -> None:
    run = {"run_id": 7, "task_family": "fam", "task_name": "main", "actions": []}
    (tmp_path / "runs.yaml").write_text(yaml.safe_dump({"tasks": [run]}))
    anew = entry_points.task_family(family=str(fam), task="main", budget=2.5)
    for made in (anew, entry_points.replay("runs.yaml", budget=2.5)):
        [sample] = made.dataset
        assert sample.sandbox is not None
        assert isinstance(sample.sandbox.config, Configuration)
        assert sample.sandbox.config.budget == 2.5


@pytest.mark.parametrize("budget", [-1, True, None, "5 USD"])  # None is what Inspect makes of an empty argument
def test_a_wrong_budget_is_refused_before_a_build(fam: Path, monkeypatch: pytest.MonkeyPatch, budget: Any) -> None:
    monkeypatch.setattr(build, "family_image", lambda *_: pytest.fail("an image was built"))
    with pytest.raises(PreparationError, match="budget: "):
        entry_points.task_family(family=str(fam), budget=budget)


def test_a_replay_keeps_absolute_paths_too(fam: Path, tmp_path: Path) -> None:
    run = {"run_id": 7, "task_family": "fam", "task_name": "main", "actions": [], "expected_score": 0.5}
    (tmp_path / "runs.yaml").write_text(yaml.safe_dump({"tasks": [run]}))
    made = _only(load_tasks(["provisioner/replay"], {"tasks_path": "runs.yaml"}))
    assert resolve_task_args(made) == {"tasks_path": str(tmp_path / "runs.yaml")}
    [sample] = made.dataset
    assert (sample.id, (sample.metadata or {})["expected_score"]) == ("7", 0.5)


def test_a_familys_task_and_samples_have_metrs_names(fam: Path) -> None:
    made = entry_points.task_family(family=str(fam), task="main")
    assert (made.name, made.version) == ("fam", "2.1.3")
    [sample] = made.dataset
    assert (sample.id, sample.input) == ("main", "Do it.")
    metadata: dict[str, Any] = sample.metadata or {}
    assert {key: metadata[key] for key in metadata if key != "provisioner"} == {
        "task_name": "main",
        "task_family": "fam",
        "actions": [],
        "expected_score": None,
        "instructions": "Do it.",
        "permissions": [],
    }


@pytest.mark.parametrize(
    ("given", "samples"),
    [("main,other", ["main", "other"]), ("main", ["main"]), ("7", ["7"]), ("7, main", ["7", "main"])],
)
def test_tasks_are_named_on_inspects_command_line(fam: Path, cloud: FakeCloud, given: str, samples: list[str]) -> None:
    (fam / "fam.py").write_text((fam / "fam.py").read_text().replace('"main": {}', '"main": {}, "other": {}, "7": {}'))
    cloud.guest_defaults = {"values": {"setup": {**SETUP, "tasks": {name: {} for name in ("main", "other", "7")}}}}
    arguments = parse_cli_args(["family=fam", f"task={given}"])
    made = _only(load_tasks(["provisioner/task_family"], arguments))
    assert [sample.id for sample in made.dataset] == samples
    again = _only(load_tasks(["provisioner/task_family"], resolve_task_args(made)))
    assert [sample.id for sample in again.dataset] == samples


def test_a_wrong_argument_is_named(fam: Path) -> None:
    arguments = parse_cli_args(["family=fam", "cloud=mars"])
    with pytest.raises(PreparationError, match=r"The configuration by the task's arguments is not valid:\n.*cloud"):
        load_tasks(["provisioner/task_family"], arguments)


def test_a_missing_family_and_a_bad_ttl_are_explained(fam: Path, tmp_path: Path) -> None:
    with pytest.raises(PreparationError, match=f"^{tmp_path}/nowhere does not exist: a task family is a directory"):
        load_tasks(["provisioner/task_family"], {"family": "nowhere"})
    with pytest.raises(PreparationError, match="Say the unit: 90h for hours, 90m for minutes"):
        load_tasks(["provisioner/task_family"], {"family": "fam", "ttl": 90})
