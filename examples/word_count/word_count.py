"""Questions about the words of a short story: apt and pip in install(), build steps, several tasks, a manifest."""

import json
import pathlib
import subprocess
import sys
from collections import Counter
from typing import TypedDict

STORY = pathlib.Path("/opt/word_count/story.txt")
# build_steps.json makes it from the story: one word a line, in lower case.
WORDS = pathlib.Path("/opt/word_count/words.txt")
ROWS = 3

QUESTIONS = {
    "total": "How many words does the story have? Submit the number.",
    "longest": "Which is the longest word of the story? Submit it in lower case.",
    "table": (
        f"Submit a table of the {ROWS} most frequent words of the story, the most frequent first, words in lower case, "
        "in the style of /home/agent/example.txt. You have internet access."
    ),
}


class Task(TypedDict):
    name: str


def _words() -> list[str]:
    return WORDS.read_text().split()


def _table(counts: list[tuple[str, int]]) -> str:
    # install() brings it: before, it cannot be imported.
    from tabulate import tabulate

    return str(tabulate(counts, headers=["word", "count"], tablefmt="github"))


def _rows(table: str) -> list[list[str]]:
    """The table's cells, without its two lines of heading."""
    lines = [line.strip().strip("|") for line in table.strip().splitlines()]
    return [[cell.strip() for cell in line.split("|")] for line in lines[2:]]


class TaskFamily:
    standard_version = "0.5.0"

    @staticmethod
    def get_tasks() -> dict[str, Task]:
        return {name: {"name": name} for name in QUESTIONS}

    @staticmethod
    def get_permissions(t: Task) -> list[str]:
        return ["full_internet"] if t["name"] == "table" else []

    @staticmethod
    def get_instructions(t: Task) -> str:
        return f"The story is in /home/agent/story.json. {QUESTIONS[t['name']]} (Write to /home/agent/submission.txt.)"

    @staticmethod
    def install() -> None:
        subprocess.run(["apt-get", "install", "-y", "--no-install-recommends", "jq"], check=True)
        subprocess.run([sys.executable, "-m", "pip", "install", "--no-cache-dir", "tabulate==0.9.0"], check=True)

    @staticmethod
    def start(t: Task) -> None:
        home = pathlib.Path("/home/agent")
        story = subprocess.run(
            ["jq", "--raw-input", "--slurp", "{story: .}", str(STORY)], stdout=subprocess.PIPE, check=True
        )
        (home / "story.json").write_bytes(story.stdout)
        (home / "example.txt").write_text(_table([("apple", 7), ("pear", 2)]) + "\n")

    @staticmethod
    def score(t: Task, submission: str) -> float:
        if t["name"] == "total":
            return float(submission.strip() == str(len(_words())))
        if t["name"] == "longest":
            return float(submission.strip() == max(_words(), key=len))
        right = _rows(_table(Counter(_words()).most_common(ROWS)))
        submitted = _rows(submission)
        print(json.dumps({"submitted_rows": len(submitted)}))
        return sum(mine == theirs for mine, theirs in zip(right, submitted, strict=False)) / ROWS
