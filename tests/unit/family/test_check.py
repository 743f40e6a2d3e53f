"""Whole families: those that work are left alone, and those that surely fail are refused before anything is created."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, get_args

import pytest

from provisioner.base.errors import MissingVariablesError, TaskFamilyError, UsageError
from provisioner.family import source
from provisioner.family.check import check_family, refuse_mistakes
from provisioner.family.findings import Rule
from provisioner.family.loader import load_family
from provisioner.family.setup_data import unknown_task
from tests.command_line import ROOT
from tests.unit.family.families import GOOD, TASKS, VARIABLES, changed, checked, found

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
    monkeypatch.setattr(source, "MAXIMUM_TOKENS", 10)
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


LISTED = changed(VARIABLES, 'required_environment_variables = ["A", "B"]')
FROM_CONSTANT = changed(TASKS, "return T")
SCORE = "    @staticmethod\n    def score(t, submission):\n        return float(submission)\n"


def in_class(text: str, module: str = GOOD) -> str:
    """Puts text into the class, before start()."""
    return changed("    @staticmethod\n    def start", f"{text}\n\n    @staticmethod\n    def start", module)


# Families that are not what a quick look at their text says.
CHANGED = {
    "plain": GOOD,
    "base": GOOD.replace("class TaskFamily", "class Base")
    + "\nclass TaskFamily(Base):\n    get_tasks = lambda: {'x': 1}\n",
    "base that changes it": (
        "class Base:\n    def __init_subclass__(cls):\n        cls.get_tasks = lambda: {'x': 1}\n"
        + changed("class TaskFamily:", "class TaskFamily(Base):")
    ),
    "metaclass": (
        "class Meta(type):\n    def __getattribute__(cls, name):\n"
        "        return (lambda: {'x': 1}) if name == 'get_tasks' else super().__getattribute__(name)\n"
        + changed("class TaskFamily:", "class TaskFamily(metaclass=Meta):")
    ),
    "class decorator": (
        "def tasks(cls):\n    cls.get_tasks = lambda: {'x': 1}\n    return cls\n\n"
        + changed("class TaskFamily:", "@tasks\nclass TaskFamily:")
    ),
    "function decorator": (
        "def more(f):\n    return staticmethod(lambda: {**f(), 'x': 1})\n\n"
        + changed("    @staticmethod\n    def get_tasks", "    @more\n    def get_tasks")
    ),
    "assigned later": f"{GOOD}\nTaskFamily.get_tasks = lambda: {{'x': 1}}\n",
    "by setattr": f"{GOOD}\nsetattr(TaskFamily, 'get_' + 'tasks', lambda: {{'x': 1}})\n",
    "by another name": f"{GOOD}\nF = TaskFamily\nF.get_tasks = lambda: {{'x': 1}}\n",
    "by globals": f"{GOOD}\nglobals()['Task' + 'Family'].get_tasks = lambda: {{'x': 1}}\n",
    "by exec": f"{GOOD}\nexec('Task' + 'Family.get_' + 'tasks = lambda: dict(x=1)')\n",
    "by a function": f"{GOOD}\ndef change(cls):\n    cls.get_tasks = lambda: {{'x': 1}}\n\nchange(TaskFamily)\n",
    "class replaced": f"{GOOD}\nclass Other:\n    get_tasks = lambda: {{'x': 1}}\n\nTaskFamily = Other\n",
    "class made by type": GOOD.replace("TaskFamily", "Base")
    + "\nTaskFamily = type('F', (Base,), {'get_tasks': lambda: {'x': 1}})\n",
    "class in if": "if True:\n    class TaskFamily:\n        get_tasks = lambda: {'x': 1}\n",
    "defined twice": in_class("    def get_tasks():\n        return {'x': 1}"),
    "defined in if": in_class("    if 1:\n        get_tasks = lambda: {'x': 1}"),
    "loop variable": in_class("    for get_tasks in [lambda: {'x': 1}]:\n        pass"),
    "constant": "T = {'easy': 1}\nT['x'] = 1\n" + FROM_CONSTANT,
    "default argument": "T = {'easy': 1}\n" + FROM_CONSTANT.replace("def get_tasks():", "def get_tasks(T={'x': 1}):"),
    "variables shrink in the class": in_class("    required_environment_variables.remove('A')", LISTED),
    "variables shrink later": f"{LISTED}\nTaskFamily.required_environment_variables.remove('A')\n",
    "variables shrink by name": f"{LISTED}\ngetattr(TaskFamily, 'required_environment_variables').clear()\n",
    "variables are replaced": in_class("    required_environment_variables = []", LISTED),
    "variables are deleted": f"{LISTED}\ndel TaskFamily.required_environment_variables\n",
    "bound methods": (
        "class Tools:\n    def score(self, t, submission):\n        return 1.0\n"
        + changed(SCORE, "    score = Tools().score\n")
    ),
    "self is the task": changed("    @staticmethod\n    def start(t)", "    def start(self)"),
    "swallows all": changed(SCORE, "    def score(*_, **__):\n        return 1.0\n"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_no_valid_family_is_refused(tmp_path: Path, name: str) -> None:
    root = tmp_path / "fam"
    root.mkdir()
    (root / "fam.py").write_text(CHANGED[name])
    module = types.ModuleType("fam")
    exec(compile(CHANGED[name], "fam.py", "exec"), module.__dict__)  # the texts above
    family: Any = module.__dict__["TaskFamily"]
    tasks = family.get_tasks()
    variables = dict.fromkeys(getattr(family, "required_environment_variables", []), "1")
    for task in (*tasks, None):
        refuse_mistakes(load_family(root), task, variables)
    told = check_family(root)
    assert told.tasks is None or set(told.tasks) == set(tasks)
    assert set(told.needs) <= set(variables)


def test_what_is_compared_is_refused_where_it_differs(tmp_path: Path) -> None:
    root = tmp_path / "fam"
    root.mkdir()
    (root / "fam.py").write_text(LISTED)
    with pytest.raises(UsageError):
        refuse_mistakes(load_family(root), "x", {"A": "1", "B": "1"})
    with pytest.raises(UsageError):
        refuse_mistakes(load_family(root), "easy", {"A": "1"})
