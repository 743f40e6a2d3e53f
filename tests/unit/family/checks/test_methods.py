"""Signatures, static methods and names of the class's functions: tables of what is said about each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.family.checks.families import GOOD, changed, checked, found

SCORE = "    @staticmethod\n    def score(t, submission):\n        return float(submission)\n"
AGGREGATE = "    @staticmethod\n    def aggregate_scores(t, score_log):\n        return 1.0\n"
INTERMEDIATE = "    @staticmethod\n    def intermediate_score(t):\n        return {}\n"


def with_function(definition: str) -> str:
    """A family with one more function."""
    return f"{GOOD}\n    {definition}\n        pass\n"


FINE = {
    "not static": changed("    @staticmethod\n    def start(t):", "    def start(t):"),
    "default": changed("def start(t):", "def start(t, more=1):"),
    "star": changed("def score(t, submission):", "def score(*args, **kwargs):"),
    "other names": changed("def score(t, submission):", "def score(_task, answer, /):"),
    "keyword with default": changed("def start(t):", "def start(t, *, more=1):"),
    "class method": changed("@staticmethod\n    def start(t):", "@classmethod\n    def start(cls, t):"),
    "assigned": changed(SCORE, "    score = staticmethod(print)\n"),
    "wrapped": changed("@staticmethod\n    def start(t):", "@staticmethod\n    @retried\n    def start():"),
    "teardown with a task": changed("def teardown():", "def teardown(t):"),
    "helper": with_function("def _get_instruction(self, x):"),
    "another name": with_function("def build_world(a):"),
    "all three": GOOD + INTERMEDIATE + AGGREGATE,
    "aggregate": changed(SCORE, INTERMEDIATE + AGGREGATE),
}
WRONG = {
    "self": (
        changed("def score(t, submission):", "def score(self, t, submission):"), "error wrong-parameters fam.py:22",
    ),
    "too few": (changed("def score(t, submission):", "def score(t):"), "error wrong-parameters fam.py:22"),
    "too many": (changed("def start(t):", "def start(t, x):"), "error wrong-parameters fam.py:18"),
    "class method without cls": (
        changed("@staticmethod\n    def start(t):", "@classmethod\n    def start(t):"),
        "error wrong-parameters fam.py:18",
    ),
    "keyword": (changed("def start(t):", "def start(t, *, more):"), "error wrong-parameters fam.py:18"),
    "install": (with_function("@staticmethod\n    def install(t):"), "error wrong-parameters fam.py:30"),
    "aux": (with_function("@staticmethod\n    def get_aux_vm_spec():"), "error wrong-parameters fam.py:30"),
    "teardown": (changed("def teardown():", "def teardown(a, b):"), "warning wrong-parameters fam.py:26"),
    "score that nothing calls": (
        changed("def score(t, submission):", "def score(t):") + INTERMEDIATE + AGGREGATE,
        "warning wrong-parameters fam.py:22",
    ),
    "async score": (changed("def score(t", "async def score(t"), "error async-method fam.py:22"),
    "async start": (changed("def start(t", "async def start(t"), "warning async-method fam.py:18"),
    "misspelt": (changed("def get_permissions(t):", "def get_permission(t):"), "warning misspelt-name fam.py:10"),
    "misspelt variables": (
        changed("required_environment_variables", "required_env_variables"), "warning misspelt-name fam.py:3",
    ),
    "no instructions": (
        changed('    @staticmethod\n    def get_instructions(t):\n        return "Submit 1."\n', ""),
        "warning missing-instructions fam.py:1",
    ),
    "no score": (changed(SCORE, ""), "warning no-score fam.py:1"),
    "intermediate alone": (changed(SCORE, INTERMEDIATE), "warning no-score fam.py:1"),
    "aggregate alone": (changed(SCORE, AGGREGATE), "warning no-score fam.py:1"),
}  # fmt: skip


@pytest.mark.parametrize("name", FINE)
def test_nothing_is_said_of_what_works(tmp_path: Path, name: str) -> None:
    assert found(checked(tmp_path, FINE[name])) == []


@pytest.mark.parametrize("name", WRONG)
def test_what_fails_is_found(tmp_path: Path, name: str) -> None:
    text, finding = WRONG[name]
    assert found(checked(tmp_path, text)) == [finding]


def test_a_finding_shows_the_parameters_and_says_what_to_write(tmp_path: Path) -> None:
    text = changed("def score(t, submission):", "def score(self, t, *rest, kind, **more):")
    finding = checked(tmp_path, text).findings[0]
    assert finding.what == "score(self, t, *rest, kind=, **more) cannot be called with the task and the submission."
    assert "def score(t, submission)" in finding.fix
