"""What is certain of a class, and what is not: everything that could change it makes it unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.family.checks.literals import literal_tasks
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
    "dict of the class": f"{GOOD}\nTaskFamily.__dict__\n",
    "by its name": f"{GOOD}\ngetattr(this, 'TaskFamily')\n",
    "setattr": f"{GOOD}\nsetattr(x, y, z)\n",
    "globals": f"{GOOD}\nglobals().update(x)\n",
    "exec": f"{GOOD}\nexec(x)\n",
    "sys.modules": f"{GOOD}\nimport sys\nsys.modules[__name__] = other\n",
    "modules of sys": f"{GOOD}\nfrom sys import modules\n",
    "builtins": f"import builtins\n{GOOD}",
    "cls": changed("def start(t):\n        pass", "def start(t):\n        t.cls.get_tasks = print"),
    "in if": "if 1:\n" + "".join(f"    {line}\n" for line in GOOD.splitlines()),
    "another staticmethod": f"staticmethod = wrapped\n{GOOD}",
    "imported staticmethod": f"from other import better as staticmethod\n{GOOD}",
    "defined staticmethod": f"def staticmethod(f):\n    pass\n{GOOD}",
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
    "constant is changed": "T = {'a': {}}\nT['b'] = {}\n" + changed(TASKS, "return T"),
    "constant is updated": "T = {'a': {}}\nT.update(x)\n" + changed(TASKS, "return T"),
    "constant is handed out": "T = {'a': {}}\nfill(T)\n" + changed(TASKS, "return T"),
    "constant has two names": "T = U = {'a': {}}\n" + changed(TASKS, "return T").replace("pass", "U['b'] = 1"),
    "constant is bound twice": "T = {'a': {}}\nT = {'b': {}}\n" + changed(TASKS, "return T"),
    "constant is returned to others": "T = {'a': {}}\n"
    + changed(TASKS, "return T")
    + "TaskFamily.get_tasks().update(x)\n",
    "parameter": "T = {'a': {}}\n" + changed("def get_tasks():", "def get_tasks(T=1):").replace(TASKS, "return T"),
}
TASKS_KNOWN = {
    "plain": GOOD,
    "documented": changed(TASKS, f'"""Returns all."""\n        {TASKS}'),
    "constant": "T = {'easy': {}, 'hard': {}}\n" + changed(TASKS, "return T"),
    "constant is read": (
        "T = {'easy': {}, 'hard': {}}\nfor name in T: print(T[name])\nx = [n for n in T.keys() if n in T]\n"
        + changed(TASKS, "return T")
    ),
    "annotated constant": "T: dict = {'easy': {}, 'hard': {}}\n" + changed(TASKS, "return T"),
    "values are computed": changed(TASKS, 'return {"easy": make(1), "hard": {**x}}'),
    "used as a script": f"{GOOD}\nif __name__ == '__main__':\n    print(TaskFamily.get_tasks())\n",
    "object": changed("class TaskFamily:", "class TaskFamily(object):"),
    "class method": changed("    @staticmethod\n    def get_tasks()", "    @classmethod\n    def get_tasks(cls)"),
    "eval() of another": f"{GOOD}\nmodel.eval()\n",
}


def source_of(directory: Path, text: str, **files: str) -> FamilySource:
    root = directory / "fam"
    root.mkdir()
    for name, content in {"fam.py": text, **files}.items():
        (root / name).write_text(content)
    source = read_source(load_family(root))
    assert source
    return source


@pytest.mark.parametrize("name", CHANGING)
def test_nothing_is_certain_of_a_class_that_may_change(tmp_path: Path, name: str) -> None:
    source = source_of(tmp_path, CHANGING[name])
    assert source.definition is None
    assert not source.lacks("nothing")
    assert source.member("score") is None
    assert literal_tasks(source) is None


@pytest.mark.parametrize("name", TASKS_UNKNOWN)
def test_tasks_that_are_computed_are_not_known(tmp_path: Path, name: str) -> None:
    source = source_of(tmp_path, TASKS_UNKNOWN[name])
    assert source.definition
    assert literal_tasks(source) is None


@pytest.mark.parametrize("name", TASKS_KNOWN)
def test_tasks_that_are_written_out_are_known(tmp_path: Path, name: str) -> None:
    assert list(literal_tasks(source_of(tmp_path, TASKS_KNOWN[name])) or ()) == ["easy", "hard"]


@pytest.mark.parametrize(
    "text",
    ["from fam import TaskFamily\nTaskFamily.score = print\n", "import fam\nsetattr(fam.TaskFamily, x, y)\n"],
    ids=["assigned", "setattr"],
)
def test_another_module_may_change_the_class_but_a_test_does_not(tmp_path: Path, text: str) -> None:
    (tmp_path / "1").mkdir()
    assert source_of(tmp_path / "1", GOOD, **{"other.py": text}).definition is None
    (tmp_path / "2").mkdir()
    assert source_of(tmp_path / "2", GOOD, **{"test_fam.py": text, "fam_test.py": text}).definition


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
