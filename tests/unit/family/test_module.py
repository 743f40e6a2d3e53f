"""What text alone tells of a family's module: tables of what passes and what does not."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from provisioner.errors import TaskFamilyError
from provisioner.family.loader import MAXIMUM_TOKENS, check_module, parse_module

TASKS = "    def get_tasks(): return {}\n"
GOOD = {
    "plain": f"class TaskFamily:\n{TASKS}",
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
    "in if": f"if 1:\n    class TaskFamily:\n    {TASKS}",
    "in except": f"try:\n    pass\nexcept E:\n    class TaskFamily:\n    {TASKS}",
    "twice": f"class TaskFamily: pass\nclass TaskFamily:\n{TASKS}",
    "method in if": f"class TaskFamily:\n    if 1:\n    {TASKS}",
    "aggregate": f"class TaskFamily:\n{TASKS}    score = aggregate_scores = intermediate_score = f\n",
    "inherits aggregate": f"class TaskFamily(B):\n{TASKS}    score = aggregate_scores = f\n",
    "bad escape": f"'\\d'\nclass TaskFamily:\n{TASKS}",
    "many elifs": f"class TaskFamily:\n{TASKS}if 1: pass\n" + "elif 1: pass\n" * 2000,
    "latin-1": f"# -*- coding: latin-1 -*-\nclass TaskFamily:\n{TASKS}",
}
BAD = {
    "in function": (f"def f():\n    class TaskFamily:\n    {TASKS}", "has no class TaskFamily"),
    "annotation alone": ("TaskFamily: type\n", "has no class TaskFamily"),
    "nested": (f"class A:\n    class TaskFamily:\n    {TASKS}", "has no class TaskFamily"),
    "no tasks": ("\nclass TaskFamily: pass\n", r"\(line 2\) has no get_tasks"),
    "nested tasks": ("class TaskFamily:\n    def f():\n        def get_tasks(): pass\n", "has no get_tasks"),
    "both scorings": (
        f"class TaskFamily:\n{TASKS}    score = aggregate_scores = f\n",
        "both score and aggregate_scores",
    ),
    "newer syntax": (f"type X = int\nclass TaskFamily:\n{TASKS}", r"is not valid Python: .* \(line 1\)"),
    "encoding": ("# -*- coding: nonsense -*-\n", "is not valid Python"),
}


def check(directory: Path, text: str) -> None:
    path = directory / "fam.py"
    path.write_bytes(text.encode())
    check_module(path)


@pytest.mark.parametrize("name", GOOD)
def test_a_class_that_may_be_a_task_family_passes(tmp_path: Path, name: str) -> None:
    check(tmp_path, GOOD[name])


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
    path.write_text(f"class TaskFamily:\n{TASKS}x = '{'0' * 2 * MAXIMUM_TOKENS}'\n")
    assert parse_module(path)


def test_modules_are_parsed_in_several_threads_at_once(tmp_path: Path) -> None:
    """A garbage collection in the middle of one module's parsing gives another thread its turn."""

    def turn(*_: object) -> None:
        time.sleep(0.0001)

    text = f"class TaskFamily:\n{TASKS}" + "x = [a, (b, {c: d})]\n" * 60
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
