"""Runs each command of the tutorial on evals as it stands there, with a scripted model where a key would be needed."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from inspect_ai.log import EvalLog, list_eval_logs, read_eval_log

from provisioner.store.home import Home
from tests.command_line import ROOT

PAGE = ROOT / "docs" / "tutorial" / "first-eval.md"
# The first section, which has made the environment that the tests run in.
SET_UP = ("scripts/setup", ".venv/bin/pip install", "export PATH=")
OPENAI = "--model openai/gpt-4o"
# An agent that achieves nothing. Without a script, mockllm would download a tokenizer to count its words.
SCRIPT = "--model mockllm/model --solver examples/inspect/scripted.py -S command=id"
# The accuracies of the evals, in the tutorial's order.
ACCURACIES = [1.0, 1.0, 0.0, 1.0, 0.0]

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("tasks"),
    pytest.mark.filterwarnings("default"),  # Inspect's own deprecations
]


def commands() -> list[str]:
    """Returns the page's commands: lines of indented blocks, but those that quote a file."""
    lines = re.findall(r"^ {4}(\S.*)$", PAGE.read_text(), re.MULTILINE)
    quoted = (ROOT / "examples" / "inspect" / "port_scan.py").read_text()
    return [line for line in lines if line not in quoted and not line.startswith(SET_UP)]


@pytest.fixture
def variables(home: Home, tmp_path: Path) -> dict[str, str]:
    """What the commands are told by their environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "INSPECT_LOG_DIR": str(tmp_path / "logs"), "INSPECT_DISPLAY": "plain"}


def _run(line: str, variables: dict[str, str]) -> str:
    done = subprocess.run(
        shlex.split(line), cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def _view(line: str, variables: dict[str, str]) -> None:
    """Checks that the viewer says where it serves, and ends it."""
    with subprocess.Popen(
        shlex.split(line), cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as viewer:
        assert viewer.stdout is not None
        deadline = time.monotonic() + 120
        told = ""
        while "http://" not in told and time.monotonic() < deadline and (text := viewer.stdout.readline()):
            told += text
        viewer.send_signal(signal.SIGINT)
        viewer.stdout.read()
    assert "http://" in told, told


def _logs(directory: Path) -> list[EvalLog]:
    logs = [read_eval_log(info) for info in list_eval_logs(str(directory), descending=False)]
    return sorted(logs, key=lambda log: log.eval.created)


def test_each_command_of_the_tutorial_does_what_it_says(home: Home, tmp_path: Path, variables: dict[str, str]) -> None:
    lines = commands()
    assert sum(line.startswith("inspect eval ") for line in lines) == len(ACCURACIES)
    for line in lines:
        if line.startswith("inspect view"):
            _view(line, variables)
            continue
        output = _run(line.replace(OPENAI, SCRIPT), variables)
        if line == "provisioner doctor":
            assert "Ready: this machine has everything that the local cloud needs." in output
        if line == "provisioner list":
            assert json.loads(_run("provisioner list --json", variables))["environments"] == []
    logs = _logs(tmp_path / "logs")
    assert [log.status for log in logs] == ["success"] * len(ACCURACIES)
    for log, accuracy in zip(logs, ACCURACIES, strict=True):
        assert log.results is not None
        [score] = log.results.scores
        assert score.metrics["accuracy"].value == accuracy, log.eval.task
    escape = logs[3].samples or []
    assert "uid=0(root)" in "".join(message.text for message in escape[0].messages if message.role == "tool")
    assert [log.eval.dataset.samples for log in logs] == [2, 1, 1, 1, 1]
