"""Replays recorded runs of the examples' families, and of one whose code quotes its secrets wherever it can."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from inspect_ai import eval as inspect_eval
from inspect_ai.log import EvalSample

from provisioner.inspect.task_family import Run, load, replay
from provisioner.store.environments import EnvironmentStore
from provisioner.store.home import Home
from tests.batch.test_batch_local import EXPECTED
from tests.command_line import ROOT, answer
from tests.inspect.scripted import logged

EXAMPLES = ROOT / "examples"
RECORDINGS = [EXAMPLES / "inspect" / f"{name}.yaml" for name in ("word_count", "number_guess", "guestbook")]
SECRET = "the-bytes-of-a-secret-0815"

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("tasks"),
    pytest.mark.filterwarnings("default"),  # Inspect and what it uses warn of their own deprecations
]


def _samples(tmp_path: Path, *recordings: Path, **arguments: str) -> dict[tuple[str, str], EvalSample]:
    """Replays recordings at once, and returns the samples by family and task."""
    logs = inspect_eval(
        [replay(tasks_path=str(path), **arguments) for path in recordings],
        model="mockllm/model",
        max_tasks=len(recordings),
        fail_on_error=False,
        log_dir=str(tmp_path / "logs"),
        display="none",
    )
    samples = [sample for log in logs for sample in log.samples or []]
    return {(sample.metadata["task_family"], sample.metadata["task_name"]): sample for sample in samples}


def _score_of_run(home: Home, tmp_path: Path, run: Run) -> float:
    """Returns the score of `provisioner run` with an agent that runs the recorded commands."""
    agent = tmp_path / str(run.run_id)
    agent.mkdir()
    commands = [call.arguments["command"] for action in run.actions for call in action.calls if call.name == "bash"]
    (agent / "solve.sh").write_text("\n".join(["set -eu", *commands]))
    options = ("--agent", str(agent), "--command", "bash solve.sh")
    result = answer(home, "run", str(EXAMPLES / run.task_family), run.task_name, *options)
    assert result["status"] == "scored", result
    return float(result["score"])


def test_replayed_solutions_score_as_provisioner_run_scores_them(home: Home, tmp_path: Path) -> None:
    samples = _samples(tmp_path, *RECORDINGS, families_path=str(EXAMPLES))
    runs = [run for path in RECORDINGS for run in load(path).tasks]
    assert set(samples) == {(run.task_family, run.task_name) for run in runs}
    # tests/batch/test_batch_local.py has the command line score the same commands.
    scored = {task: EXPECTED[task, "counting"][1] for task in ("total", "easy")}
    for run in runs:
        sample = samples[run.task_family, run.task_name]
        assert sample.error is None, sample.error
        assert sample.scores is not None
        score = sample.scores["check_expected_score"]
        assert score.value == 1.0, (run.run_id, score)
        assert score.metadata is not None
        if run.task_name in ("table", "hard", "main"):
            scored[run.task_name] = _score_of_run(home, tmp_path, run)
        expected = scored.get(run.task_name, run.expected_score)
        assert score.metadata["replay"] == pytest.approx(expected, abs=1e-9), run.run_id
    [hard] = [sample for (_, task), sample in samples.items() if task == "hard"]
    assert sum("too low" in message.text for message in hard.messages if message.role == "tool") == 2
    assert [kept for kept in EnvironmentStore(home).readable() if kept.batch] == []


# Its secret stands nowhere in it. What it returns and raises in between depends on whether the agent has made a file.
LEAKING = """
import os, pathlib


class TaskFamily:
    standard_version = "0.5.0"
    required_environment_variables = ["TOKEN"]

    @staticmethod
    def get_tasks():
        return {name: {"name": name} for name in ("start", "between", "end")}

    @staticmethod
    def get_instructions(t):
        return "Leak."

    @staticmethod
    def start(t):
        print(os.environ["TOKEN"])
        if t["name"] == "start":
            raise ValueError("start has " + os.environ["TOKEN"])

    @staticmethod
    def intermediate_score(t):
        token = os.environ["TOKEN"]
        print(token)
        if pathlib.Path("/home/agent/again").exists():
            raise ValueError("between has " + token)
        return {"score": 0.5, "message": {"hint": token}, "details": {token: [token, {"again": "x" + token}]}}

    @staticmethod
    def score(t, submission):
        raise ValueError("the end has " + os.environ["TOKEN"])
"""


def test_the_familys_words_about_secrets_reach_no_log(home: Home, tmp_path: Path) -> None:
    family = tmp_path / "leaking"
    family.mkdir()
    (family / "leaking.py").write_text(LEAKING)
    secrets = tmp_path / "secrets.env"
    secrets.write_text(f"TOKEN={SECRET}\n")
    score, again = {"name": "score", "arguments": {}}, {"name": "bash", "arguments": {"command": "touch ~/again"}}
    calls = {"start": [], "between": [score, again, score], "end": [score]}
    runs = [
        {"run_id": task, "task_family": "leaking", "task_name": task, "actions": [{"calls": [call]} for call in made]}
        for task, made in calls.items()
    ]
    (tmp_path / "leaking.yaml").write_text(yaml.safe_dump({"name": "leaking", "tasks": runs}))
    samples = _samples(tmp_path, tmp_path / "leaking.yaml", secrets_env_path=str(secrets))

    # What fails in between ends no sample: an agent could bring it about, and would get another machine.
    said = {"start": "start has", "between": "the end has", "end": "the end has"}
    for task, text in said.items():
        error = samples["leaking", task].error
        assert error is not None
        assert f"{text} [redacted:TOKEN]" in error.message, error.message
    told = [message.text for message in samples["leaking", "end"].messages if message.role == "tool"]
    assert "[redacted:TOKEN]" in told[0]
    log = logged(tmp_path / "logs")
    assert b"between has [redacted:TOKEN]" in log
    assert SECRET.encode() not in log
