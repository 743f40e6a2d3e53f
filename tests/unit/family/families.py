"""Families for the tests of checks: a module's text goes in, rules and places of the findings come out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from provisioner.family.check import Checked, check_family

# A whole family without a mistake; each test changes what it is about.
GOOD = """\
class TaskFamily:
    standard_version = "0.5.0"
    required_environment_variables = []

    @staticmethod
    def get_tasks():
        return {"easy": {}, "hard": {}}

    @staticmethod
    def get_permissions(t):
        return []

    @staticmethod
    def get_instructions(t):
        return "Submit 1."

    @staticmethod
    def start(t):
        pass

    @staticmethod
    def score(t, submission):
        return float(submission)

    @staticmethod
    def teardown():
        pass
"""
TASKS = 'return {"easy": {}, "hard": {}}'
VARIABLES = "required_environment_variables = []"


def changed(old: str, new: str, text: str = GOOD) -> str:
    """Returns a module's text with one thing changed."""
    assert text.count(old) == 1
    return text.replace(old, new)


def checked(
    directory: Path,
    module: str = GOOD,
    files: Mapping[str, str] | None = None,
    task: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> Checked:
    """Writes a family called `fam` and checks it."""
    root = directory / "fam"
    for name, text in {"fam.py": module, **(files or {})}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return check_family(root, task, variables)


def found(result: Checked) -> list[str]:
    """Returns level, rule and place of each finding."""
    return [f"{finding.level} {finding.rule} {finding.place}" for finding in result.findings]
