"""No valid family is refused, however it makes its class: each is imported here, and compared with its text."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

from provisioner.errors import UsageError
from provisioner.family.checks.family_check import check_family, refuse_mistakes
from provisioner.family.loader import load_family
from tests.unit.family.checks.families import GOOD, TASKS, VARIABLES, changed

LISTED = changed(VARIABLES, 'required_environment_variables = ["A", "B"]')
FROM_CONSTANT = changed(TASKS, "return T")
SCORE = "    @staticmethod\n    def score(t, submission):\n        return float(submission)\n"


def in_class(text: str, module: str = GOOD) -> str:
    """Puts text into the class, before start()."""
    return changed("    @staticmethod\n    def start", f"{text}\n\n    @staticmethod\n    def start", module)


# Families that are not what a quick look at their text says.
FAMILIES = {
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


@pytest.mark.parametrize("name", FAMILIES)
def test_no_valid_family_is_refused(tmp_path: Path, name: str) -> None:
    root = tmp_path / "fam"
    root.mkdir()
    (root / "fam.py").write_text(FAMILIES[name])
    module = types.ModuleType("fam")
    exec(compile(FAMILIES[name], "fam.py", "exec"), module.__dict__)  # the texts above
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
