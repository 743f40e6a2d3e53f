"""What is certain of a class, and what is not: everything that could change it makes it unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.family.checks.names import task_names
from provisioner.family.checks.source import FamilySource, read_source
from provisioner.family.loader import load_family
from tests.unit.family.checks.families import GOOD, TASKS, VARIABLES, changed

# Each could make the class another than the one that is written.
CHANGING = {
    "base": changed("class TaskFamily:", "from other import Base\nclass TaskFamily(Base):"),
    "metaclass": changed("class TaskFamily:", "class TaskFamily(metaclass=type):"),
    "decorator": changed("class TaskFamily:", "@print\nclass TaskFamily:"),
    "second binding": f"{GOOD}\nTaskFamily = wrap()\n",
    "star import": f"{GOOD}\nfrom other import *\n",
    "assigned attribute": f"{GOOD}\nTaskFamily.score = print\n",
    "deleted attribute": f"{GOOD}\ndel TaskFamily.score\n",
    "handed out": f"{GOOD}\nregister(TaskFamily)\n",
    "setattr": f"{GOOD}\nsetattr(x, y, z)\n",
    "globals": f"{GOOD}\nglobals().update(x)\n",
    "exec": f"{GOOD}\nexec(x)\n",
    "cls": changed("def start(t):\n        pass", "def start(t):\n        t.cls.get_tasks = print"),
    "in if": "if 1:\n" + "".join(f"    {line}\n" for line in GOOD.splitlines()),
    "in a function": f"{GOOD}\ndef f():\n    global TaskFamily\n    TaskFamily = 1\n",
}
# Each leaves the class as it is, but not the one thing that it is about.
TASKS_UNKNOWN = {
    "computed": changed(TASKS, "return {name: {} for name in NAMES}"),
    "unpacked": changed(TASKS, 'return {"easy": {}, **MORE}'),
    "computed name": changed(TASKS, 'return {"easy": {}, f"{x}": {}}'),
    "more statements": changed(TASKS, f"x = 1\n        {TASKS}"),
    "conditional": changed(TASKS, f"if x:\n            {TASKS}"),
    "another decorator": changed(
        "    @staticmethod\n    def get_tasks", "    @staticmethod\n    @cache\n    def get_tasks"
    ),
    "twice": changed(
        "    @staticmethod\n    def get_tasks",
        "    if x:\n        def get_tasks(): pass\n    @staticmethod\n    def get_tasks",
    ),
    "constant": "T = {'a': {}}\n" + changed(TASKS, "return T"),
    "comprehension": changed(TASKS, 'return {name: {} for name in ["a"]}'),
    "no task": changed(TASKS, "return {}"),
    "nothing": changed(TASKS, "return"),
}
TASKS_KNOWN = {
    "plain": GOOD,
    "documented": changed(TASKS, f'"""Returns all."""\n        {TASKS}'),
    "values are computed": changed(TASKS, 'return {"easy": make(1), "hard": {**x}}'),
    "used as a script": f"{GOOD}\nif __name__ == '__main__':\n    print(TaskFamily.get_tasks())\n",
    "object": changed("class TaskFamily:", "class TaskFamily(object):"),
    "class method": changed("    @staticmethod\n    def get_tasks()", "    @classmethod\n    def get_tasks(cls)"),
    "eval() of another": f"{GOOD}\nmodel.eval()\n",
}


def source_of(directory: Path, text: str) -> FamilySource:
    root = directory / "fam"
    root.mkdir()
    (root / "fam.py").write_text(text)
    source = read_source(load_family(root))
    assert source
    return source


@pytest.mark.parametrize("name", CHANGING)
def test_nothing_is_certain_of_a_class_that_may_change(tmp_path: Path, name: str) -> None:
    source = source_of(tmp_path, CHANGING[name])
    assert source.definition is None
    assert not source.lacks("nothing")
    assert source.function("score") is None
    assert task_names(source) is None


@pytest.mark.parametrize("name", TASKS_UNKNOWN)
def test_tasks_that_are_computed_are_not_known(tmp_path: Path, name: str) -> None:
    source = source_of(tmp_path, TASKS_UNKNOWN[name])
    assert source.definition
    assert task_names(source) is None


@pytest.mark.parametrize("name", TASKS_KNOWN)
def test_tasks_that_are_literals_are_known(tmp_path: Path, name: str) -> None:
    assert task_names(source_of(tmp_path, TASKS_KNOWN[name])) == ("easy", "hard")


@pytest.mark.parametrize(
    ("change", "known"),
    [
        ("", True),
        ("TaskFamily.required_environment_variables.append(x)", False),
        ("x.required_environment_variables = y", False),
        ("getattr(x, 'required_environment_variables')", False),
        ("required_environment_variables = 1", False),
    ],
    ids=["alone", "appended", "assigned", "by name", "another"],
)
def test_an_attribute_is_known_if_nothing_else_names_it(tmp_path: Path, change: str, known: bool) -> None:
    source = source_of(tmp_path, f"{changed(VARIABLES, 'required_environment_variables = [1]')}\n{change}\n")
    assert (source.attribute("required_environment_variables") is not None) == known


@pytest.mark.parametrize(
    "body",
    ["for start in x: pass", "with x as start: pass", "start: int = 1", "del start", "import start", "(start := 1)"],
    ids=["for", "with", "annotated", "del", "import", "walrus"],
)
def test_a_class_lacks_no_name_that_its_body_binds_in_any_way(tmp_path: Path, body: str) -> None:
    text = changed("    @staticmethod\n    def start(t):\n        pass\n", f"    {body}\n")
    assert not source_of(tmp_path, text).lacks("start")
