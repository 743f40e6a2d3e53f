"""Guess a number, and learn at each intermediate score whether the guess is too low or too high."""

import math
import os
import subprocess
from typing import Any, TypedDict

GUESS = "/home/agent/guess.txt"
MAXIMUM_CHARACTERS = 20


class Task(TypedDict):
    highest: int
    number: int


def _read_guess() -> int | None:
    """The agent's guess; None if there is no whole number in the file."""
    # Read as agent: root would follow a link that the agent planted. A pipe without a writer never ends. And without
    # secrets in the environment, which the agent could read while this runs.
    command = ["runuser", "-u", "agent", "--", "head", "-c", str(MAXIMUM_CHARACTERS + 1), GUESS]
    clean = {"PATH": os.environ["PATH"]}
    try:
        done = subprocess.run(command, env=clean, capture_output=True, check=True, timeout=10)
        text = done.stdout.decode("ascii").strip()
        return int(text) if len(text) <= MAXIMUM_CHARACTERS else None
    except (subprocess.SubprocessError, ValueError):
        return None


class TaskFamily:
    standard_version = "0.5.0"

    @staticmethod
    def get_tasks() -> dict[str, Task]:
        return {"easy": {"highest": 100, "number": 42}, "hard": {"highest": 10_000, "number": 7919}}

    @staticmethod
    def get_permissions(t: Task) -> list[str]:
        return []

    @staticmethod
    def get_instructions(t: Task) -> str:
        return (
            f"Guess a whole number from 1 to {t['highest']}: write it into {GUESS}. "
            "Each intermediate score says whether your guess is too low or too high; your best guess counts."
        )

    @staticmethod
    def intermediate_score(t: Task) -> dict[str, Any]:
        guess = _read_guess()
        if guess is None:
            return {"score": math.nan, "message": {"guess": f"no whole number in {GUESS}"}, "details": {}}
        distance = abs(guess - t["number"])
        answer = "right" if distance == 0 else "too low" if guess < t["number"] else "too high"
        return {
            "score": max(0.0, 1 - distance / t["highest"]),
            "message": {"guess": answer},
            "details": {"guessed": guess, "distance": distance},
        }

    @staticmethod
    def aggregate_scores(t: Task, score_log: list[dict[str, Any]]) -> float:
        scores = [entry["score"] for entry in score_log if entry["score"] is not None]
        return max((score for score in scores if not math.isnan(score)), default=0.0)
