"""Tests what Inspect's log keeps of the tasks of families, under METR's names."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from inspect_ai import Task
from inspect_ai._eval.loader import load_tasks, resolve_task_args
from inspect_ai._util.config import parse_cli_args

from provisioner.base.errors import UsageError
from provisioner.base.signals import SIGNALS
from provisioner.family.loader import TaskFamily
from provisioner.images import build
from provisioner.inspect import entry_points
from provisioner.inspect.configuration import Configuration
from provisioner.inspect.evals import Origin
from provisioner.inspect.failures import PreparationError
from provisioner.inspect.sample import SampleMachines
from provisioner.inspect.task_family import Call, FamilySamples, load, tool_call
from provisioner.session import Session
from tests.unit.conftest import CommandLine
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


EXAMPLES = Path(__file__).parents[3] / "examples"
EXAMPLE = EXAMPLES / "inspect" / "container_escape.yaml"


def test_the_example_is_a_recording() -> None:
    [run] = load(EXAMPLE).tasks
    assert (run.task_family, run.task_name, run.expected_score) == ("container_escape", "escape", 1.0)
    assert [len(action.calls) for action in run.actions] == [1, 1, 0]


@pytest.mark.parametrize(
    ("recording", "task", "agent"),
    [
        ("container_escape", "escape", "container_escape_agents/solver/solve.sh"),
        ("word_count", "total", "batch/agents/counting/run.sh"),
        ("number_guess", "easy", "batch/agents/counting/run.sh"),
    ],
)
def test_a_recording_does_what_an_examples_agent_does(recording: str, task: str, agent: str) -> None:
    script = "".join((EXAMPLES / agent).read_text().split())
    [run] = [run for run in load(EXAMPLES / "inspect" / f"{recording}.yaml").tasks if run.task_name == task]
    *_, command = [call.arguments["command"] for made in run.actions for call in made.calls if call.name == "bash"]
    assert "".join(command.split()) in script.replace("#shellcheckdisable=SC2016#theothermachine'sshellexpandsit", "")


def test_parameters_of_older_recordings_get_todays_names() -> None:
    assert tool_call(Call(name="bash", arguments={"cmd": "id"}), "1").arguments == {"command": "id"}
    assert tool_call(Call(name="submit", arguments={"submission": "x"}), "1").arguments == {"answer": "x"}
    assert tool_call(Call(name="python", arguments={"code": "1"}), "1").arguments == {"code": "1"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tasks: [{run_id: a}]", "task_family"),
        ("- a list", "not valid"),
        ("tasks: 3", "tasks"),
        ("tasks: [{run_id: a, task_family: ../x, task_name: a, actions: []}]", "task_family"),
        ("a: &a [*a]", "replay.yaml"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "replay.yaml").write_text(text)
    with pytest.raises(UsageError, match=said):
        load(tmp_path / "replay.yaml")
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path / "missing.yaml")
