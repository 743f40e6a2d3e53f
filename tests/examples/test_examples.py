"""The examples are the acceptance tests: each is run as its readers would run it, in real machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from provisioner.paths import Home

pytestmark = pytest.mark.vm
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def home(test_home: Home) -> Home:
    """The tests' home; an example may leave nothing in it but images."""
    return test_home


def provisioner(home: Home, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), *arguments],
        env={**os.environ, "PROVISIONER_HOME": str(home.root)},
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip


def answer(home: Home, command: str, *arguments: str) -> Any:
    done = provisioner(home, command, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("agent", "command", "score"), [("solver", "bash solve.sh", 1.0), ("null", "true", 0.0)])
def test_only_an_agent_that_escapes_from_the_container_scores(
    home: Home, agent: str, command: str, score: float
) -> None:
    directory = str(EXAMPLES / "container_escape_agents" / agent)
    family = str(EXAMPLES / "container_escape")
    result = answer(home, "run", family, "escape", "--agent", directory, "--command", command)
    assert (result["status"], result["score"]) == ("scored", score)


def test_the_familys_own_tests_pass_with_internet_and_what_install_brought(home: Home) -> None:
    done = provisioner(home, "test", str(EXAMPLES / "word_count"), "table")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_right_submission_scores(home: Home) -> None:
    result = answer(home, "run", str(EXAMPLES / "word_count"), "longest", "--submission", "oceanography")
    assert (result["status"], result["score"]) == ("scored", 1.0)


def test_guesses_are_scored_in_between_and_the_best_one_counts(home: Home) -> None:
    env = answer(home, "up", str(EXAMPLES / "number_guess"), "hard")["environment"]
    try:
        before = answer(home, "score", env, "--intermediate")
        assert before["entry"]["score"] is None  # nothing guessed yet: NaN in the score log
        for guess, said in (("10000", "too high"), ("7919", "right"), ("1", "too low")):
            answer(home, "exec", env, "--", "sh", "-c", 'echo "$1" > guess.txt', "sh", guess)
            entry = answer(home, "score", env, "--intermediate")["entry"]
            assert entry["message"] == {"guess": said}
        scored = answer(home, "score", env)
        assert (scored["status"], scored["score"]) == ("scored", 1.0)
        assert len(scored["score_log"]) == 6  # at start, four on request, once more at the end
    finally:
        answer(home, "destroy", env)
