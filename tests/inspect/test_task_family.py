"""Runs task families under `inspect eval`, with a scripted model in the place of a real one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import eval as inspect_eval
from inspect_ai.log import EvalLog
from inspect_ai.model import ModelOutput, get_model

from provisioner.inspect.task_family import task_family
from provisioner.store.home import Home
from tests.inspect.scripted import logged, says

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SECRET = "the-bytes-of-a-secret-4711"

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("tasks"),
    pytest.mark.filterwarnings("default"),  # Inspect and what it uses warn of their own deprecations
]


def _run(tmp_path: Path, family: Path, task: str, *says: ModelOutput, **arguments: Any) -> EvalLog:
    [log] = inspect_eval(
        task_family(family=str(family), task=task, **arguments),
        model=get_model("mockllm/model", custom_outputs=list(says)),
        log_dir=str(tmp_path / "logs"),
        display="none",
    )
    return log


def test_intermediate_scores_are_tools_and_the_best_counts(home: Home, tmp_path: Path) -> None:
    log = _run(
        tmp_path,
        EXAMPLES / "number_guess",
        "easy",
        says("bash", command="id -un; echo 40 > guess.txt"),
        says("score"),
        says("bash", command="echo 42 > guess.txt"),
        says("score"),
        says("score_log"),
        says("submit", answer=""),
    )
    assert log.status == "success", log.error
    [sample] = log.samples or []
    tools = [message.text for message in sample.messages if message.role == "tool"]
    assert tools[0].startswith("agent")
    assert "too low" in tools[1]
    assert "right" in tools[3]
    assert tools[4].count("right") == 1
    assert "distance" not in "".join(tools)
    assert sample.scores is not None
    assert sample.scores["score_metr_task"].value == 1.0
    assert sample.metadata["task_family"] == "number_guess"
    assert len(sample.store["TaskDriverStore:intermediate_scores"]) >= 3
    facts, end = (event.data for event in sample.events if event.event == "info" and event.source == "provisioner")
    assert isinstance(facts, dict)
    assert facts["cloud"] == "local"
    assert isinstance(facts["phases"], dict)
    assert {"boot", "isolation", "start"} <= set(facts["phases"])
    assert isinstance(facts["isolation"], dict)
    assert facts["isolation"]["proven"] is True
    assert isinstance(facts["versions"], dict)
    assert {"provisioner", "QEMU", "Terraform", "kernel of the primary machine"} <= set(facts["versions"])
    assert isinstance(end, dict)
    assert (end["environment"], end["usd"]) == (facts["environment"], 0.0)
    assert isinstance(end["recording"], str)
    assert (len(end["recording"]), bool(end["gone_at"])) == (64, True)


FAMILY = f"""
import os, pathlib


class TaskFamily:
    standard_version = "0.5.0"
    required_environment_variables = ["TOKEN"]

    @staticmethod
    def get_tasks():
        return {{"manual": {{}}, "echo": {{}}}}

    @staticmethod
    def get_instructions(t):
        return "Say hello."

    @staticmethod
    def start(t):
        assert os.environ["TOKEN"] == {SECRET!r}
        print(os.environ["TOKEN"])

    @staticmethod
    def score(t, submission):
        assert os.environ["TOKEN"] == {SECRET!r}
        return None if submission == "ask somebody" else float(submission == "hello")
""".replace(repr(SECRET), '"".join(reversed("' + SECRET[::-1] + '"))')


def test_a_secret_reaches_the_familys_code_and_no_log(home: Home, tmp_path: Path) -> None:
    family = tmp_path / "greeting"
    family.mkdir()
    (family / "greeting.py").write_text(FAMILY)
    (tmp_path / "secrets.env").write_text(f"TOKEN={SECRET}\n")
    answers = (says("bash", command="env; cat /proc/*/environ"), says("submit", answer="ask somebody"))
    log = _run(tmp_path, family, "manual", *answers, secrets_env_path=str(tmp_path / "secrets.env"))
    assert log.status == "success", log.error
    [sample] = log.samples or []
    assert sample.scores is not None
    score = sample.scores["score_metr_task"]
    assert isinstance(score.value, float)
    assert math.isnan(score.value)
    assert score.metadata == {"manual-scoring": True}
    assert SECRET.encode() not in logged(tmp_path / "logs")
