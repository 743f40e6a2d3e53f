"""Whole families: those that work are left alone, and those that surely fail are refused before anything is created."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from provisioner.errors import MissingVariablesError, TaskFamilyError, UsageError
from provisioner.family import loader
from provisioner.family.checks.family_check import check_family, refuse_mistakes
from provisioner.family.checks.finding import Rule
from provisioner.family.loader import load_family
from provisioner.family.setup_data import unknown_task
from tests.command_line import ROOT
from tests.unit.family.checks.families import GOOD, TASKS, VARIABLES, changed, checked, found

# Every family of the project: they are run by the tests, so each is valid.
FAMILIES = sorted(
    directory
    for pattern in ("examples/*", "tests/*/families/*", "provisioner/selftest/family/*")
    for directory in ROOT.glob(pattern)
    if (directory / f"{directory.name}.py").exists()
)
TWICE = changed("def score(t, submission):", "def score(self, t, submission):")


def test_the_projects_own_families_are_looked_at() -> None:
    assert {"container_escape", "number_guess", "lab", "own_python", "selftest"} <= {path.name for path in FAMILIES}


@pytest.mark.parametrize("directory", FAMILIES, ids=lambda path: path.name)
def test_a_family_that_works_has_no_mistakes(directory: Path) -> None:
    result = check_family(directory)
    assert found(result) == []
    refuse_mistakes(load_family(directory), None, dict.fromkeys(result.needs, "x"))


def test_what_examples_have_as_literals_is_known() -> None:
    assert check_family(ROOT / "examples" / "number_guess").tasks == ("easy", "hard")
    assert check_family(ROOT / "tests" / "local" / "families" / "lab").needs == ("LAB_TOKEN",)


def test_files_that_are_not_valid_are_all_named_with_their_lines(tmp_path: Path) -> None:
    files = {"manifest.yaml": "tasks:\n  a: {}\n  a: {}\n", "build_steps.json": "[1]"}
    result = checked(tmp_path, "class TaskFamily:\n  def\n", files)
    assert found(result) == [
        "error invalid-file build_steps.json",
        "error invalid-file fam.py:2",
        "error invalid-file manifest.yaml:3",
    ]


def test_a_directory_that_is_no_familys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskFamilyError, match="does not exist"):
        check_family(tmp_path / "nothing")


def test_a_module_that_is_too_large_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "MAXIMUM_TOKENS", 10)
    assert found(checked(tmp_path, TWICE, task="none")) == ["warning not-checked fam.py"]
    refuse_mistakes(load_family(tmp_path / "fam"), "none", {})


def refuse(directory: Path, text: str = GOOD, task: str | None = None, **files: str) -> None:
    root = directory / "fam"
    root.mkdir()
    for name, content in {"fam.py": text, **files}.items():
        (root / name).write_text(content)
    refuse_mistakes(load_family(root), task, {"GIVEN": "1"})


def test_an_unknown_task_is_refused_as_after_a_build(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no task 'eas'\. The nearest names are:\n  - 'easy'"):
        refuse(tmp_path, task="eas")


def test_all_tasks_of_a_small_family_are_named() -> None:
    assert unknown_task("fam", "hard", ["easy", "small"]).message == (
        "The family fam has no task 'hard'. Its tasks are:\n  - 'easy'\n  - 'small'"
    )
    more = unknown_task("fam", "hard", [f"task {number}" for number in range(6)])
    assert "The nearest names are:" in more.message
    assert more.hint == "`provisioner tasks FAMILY` lists all tasks."


def test_missing_variables_are_refused_as_after_a_build(tmp_path: Path) -> None:
    with pytest.raises(MissingVariablesError, match=r"not set: B, C$"):
        refuse(tmp_path, changed(VARIABLES, 'required_environment_variables = ["B", "GIVEN", "C"]'))


def test_other_mistakes_are_all_named_with_their_places(tmp_path: Path) -> None:
    with pytest.raises(TaskFamilyError) as refused:
        refuse(tmp_path, TWICE, "eas")
    assert [line.partition(": ")[0] for line in refused.value.message.splitlines()[1:]] == [
        "  - fam.py:6", "  - fam.py:22",
    ]  # fmt: skip
    assert "provisioner check" in (refused.value.hint or "")


def test_warnings_are_no_reason_to_refuse(tmp_path: Path) -> None:
    refuse(tmp_path, changed("def start(t", "async def start(t"), "easy")


def test_what_is_computed_is_not_refused(tmp_path: Path) -> None:
    computed = changed(
        TASKS, "return {name: {} for name in NAMES}", changed(VARIABLES, "required_environment_variables = V")
    )
    refuse(tmp_path, f"NAMES, V = make()\n{computed}", "anything")


def test_the_reference_explains_every_rule() -> None:
    reference = (ROOT / "docs" / "reference" / "family-checks.md").read_text()
    assert [rule for rule in get_args(Rule) if f"### `{rule}`\n" not in reference] == []


def test_mistakes_of_a_manifest_are_told_apart(tmp_path: Path) -> None:
    manifest = "tasks:\n  main:\n    resources: {cpus: -1, gpu: {}}\nversion: 2\n"
    [finding] = checked(tmp_path, files={"manifest.yaml": manifest}).findings
    head, *others = finding.what.split("; ")
    assert head.startswith("manifest.yaml is not valid: tasks.main.resources.")
    assert (len(others), "version: must be a string, not 2" in others) == (3, True)


def test_a_binary_module_is_called_so(tmp_path: Path) -> None:
    [finding] = checked(tmp_path, "\0").findings
    assert finding.what.startswith("fam.py is not Python, but binary: ")
