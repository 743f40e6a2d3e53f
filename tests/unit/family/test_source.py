"""What is certain of a class, and what is not: everything that could change it makes it unknown."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from provisioner.base.errors import TaskFamilyError
from provisioner.family.findings import task_names
from provisioner.family.loader import load_family
from provisioner.family.source import MAXIMUM_TOKENS, FamilySource, check_module, parse_module, read_source
from tests.unit.family.families import GOOD, TASKS, VARIABLES, changed

GET_TASKS = "    def get_tasks(): return {}\n"
PASSING = {
    "plain": f"class TaskFamily:\n{GET_TASKS}",
    "async": "class TaskFamily:\n    async def get_tasks(): return {}\n",
    "assigned": "class TaskFamily:\n    get_tasks = staticmethod(dict)\n",
    "annotated": "class TaskFamily:\n    get_tasks: object = dict\n",
    "inherited": "class TaskFamily(Base): pass\n",
    "metaclass": "class TaskFamily(metaclass=Meta): pass\n",
    "decorated": "@filled\nclass TaskFamily: pass\n",
    "imported": "from other import Family as TaskFamily\n",
    "star": "from other import *\n",
    "assigned class": "TaskFamily = make()\n",
    "unpacked": "A, (B, TaskFamily) = make()\n",
    "in if": f"if 1:\n    class TaskFamily:\n    {GET_TASKS}",
    "in except": f"try:\n    pass\nexcept E:\n    class TaskFamily:\n    {GET_TASKS}",
    "twice": f"class TaskFamily: pass\nclass TaskFamily:\n{GET_TASKS}",
    "method in if": f"class TaskFamily:\n    if 1:\n    {GET_TASKS}",
    "aggregate": f"class TaskFamily:\n{GET_TASKS}    score = aggregate_scores = intermediate_score = f\n",
    "inherits aggregate": f"class TaskFamily(B):\n{GET_TASKS}    score = aggregate_scores = f\n",
    "bad escape": f"'\\d'\nclass TaskFamily:\n{GET_TASKS}",
    "many elifs": f"class TaskFamily:\n{GET_TASKS}if 1: pass\n" + "elif 1: pass\n" * 2000,
    "latin-1": f"# -*- coding: latin-1 -*-\nclass TaskFamily:\n{GET_TASKS}",
}
BAD = {
    "in function": (f"def f():\n    class TaskFamily:\n    {GET_TASKS}", "has no class TaskFamily"),
    "annotation alone": ("TaskFamily: type\n", "has no class TaskFamily"),
    "nested": (f"class A:\n    class TaskFamily:\n    {GET_TASKS}", "has no class TaskFamily"),
    "no tasks": ("\nclass TaskFamily: pass\n", r"\(line 2\) has no get_tasks"),
    "nested tasks": ("class TaskFamily:\n    def f():\n        def get_tasks(): pass\n", "has no get_tasks"),
    "both scorings": (
        f"class TaskFamily:\n{GET_TASKS}    score = aggregate_scores = f\n",
        "both score and aggregate_scores",
    ),
    "newer syntax": (f"type X = int\nclass TaskFamily:\n{GET_TASKS}", r"is not valid Python: .* \(line 1\)"),
    "encoding": ("# -*- coding: nonsense -*-\n", "is not valid Python"),
}


def check(directory: Path, text: str) -> None:
    path = directory / "fam.py"
    path.write_bytes(text.encode())
    check_module(path)


@pytest.mark.parametrize("name", PASSING)
def test_a_class_that_may_be_a_task_family_passes(tmp_path: Path, name: str) -> None:
    check(tmp_path, PASSING[name])


@pytest.mark.parametrize("name", BAD)
def test_what_is_surely_no_task_family_is_refused(tmp_path: Path, name: str) -> None:
    text, says = BAD[name]
    with pytest.raises(TaskFamilyError, match=rf"fam\.py.*{says}"):
        check(tmp_path, text)


def test_an_error_of_syntax_names_line_and_python(tmp_path: Path) -> None:
    with pytest.raises(TaskFamilyError, match=r"\(line 2\)") as raised:
        check(tmp_path, "class TaskFamily:\n    def get_tasks(: pass\n")
    assert raised.value.hint == "Correct the line, or one above it, for Python 3.11."


def test_a_module_that_would_fill_memory_is_not_read_here(tmp_path: Path) -> None:
    path = tmp_path / "fam.py"
    path.write_text("x = [" + "0," * (MAXIMUM_TOKENS // 2) + "]\n")
    assert parse_module(path) is None
    check_module(path)
    path.write_text(f"class TaskFamily:\n{GET_TASKS}x = '{'0' * 2 * MAXIMUM_TOKENS}'\n")
    assert parse_module(path)


def test_modules_are_parsed_in_several_threads_at_once(tmp_path: Path) -> None:
    """A garbage collection in the middle of one module's parsing gives another thread its turn."""

    def turn(*_: object) -> None:
        time.sleep(0.0001)

    text = f"class TaskFamily:\n{GET_TASKS}" + "x = [a, (b, {c: d})]\n" * 60
    thresholds = gc.get_threshold()
    gc.callbacks.append(turn)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(4) as threads:
            directories = [tmp_path / str(number) for number in range(6)]
            for directory in directories:
                directory.mkdir()
            list(threads.map(check, directories, [text] * 6))
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(turn)


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
    source = read_source(load_family(root).module)
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
