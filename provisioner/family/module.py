"""Parses a family's Python module and checks that it defines TaskFamily properly. Never imports or runs it."""

from __future__ import annotations

import ast
import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

from provisioner.errors import TaskFamilyError
from provisioner.family.explained import METHODS, explained

CLASS_NAME = "TaskFamily"
MAXIMUM_BYTES = 4 << 20
# Parsed code takes half a KiB of memory for each word and sign. Beyond this many, only the machine looks at a module.
MAXIMUM_TOKENS = 600_000

_TOKEN = re.compile(rb"\w+|[^\w\s]")
# The Python version inside the machines: code that it cannot parse must not pass because ours is newer.
_MACHINE_PYTHON = (3, 11)
# Two threads that parse at once spoil each other's count of the depth, and one gets a SystemError (CPython's issue
# 106905, mended in 3.11.5; Debian 12 has 3.11.2). Filters of warnings belong to the process, too.
_PARSING = threading.Lock()


@explained(METHODS)
def check_module(path: Path) -> None:
    """Checks that a module parses and has a class TaskFamily with get_tasks, as far as its source shows.

    A class that has bases, is imported or assigned may get its methods from other code: the machine checks it.

    Raises:
        TaskFamilyError: the module is too large, not Python, has no TaskFamily, or the class is not a task family.
    """
    tree = parse_module(path)
    if tree is None:
        return
    bindings = class_bindings(tree)
    if not bindings:
        raise TaskFamilyError(f"{path.name} has no class {CLASS_NAME}.")
    classes = [node for node in bindings if isinstance(node, ast.ClassDef)]
    for definition in classes:
        _check_scoring(definition, path.name)
    if len(classes) == len(bindings) and not any(_may_have_get_tasks(definition) for definition in classes):
        raise TaskFamilyError(f"The class {CLASS_NAME} in {path.name} (line {classes[0].lineno}) has no get_tasks.")


def parse_module(path: Path) -> ast.Module | None:
    """Parses a module. Returns None if it has so many words and signs that its tree would fill the memory.

    Raises:
        TaskFamilyError: the module is too large, or not Python.
    """
    with path.open("rb") as file:
        source = file.read(MAXIMUM_BYTES + 1)
    if len(source) > MAXIMUM_BYTES:
        raise TaskFamilyError(f"{path.name} is larger than {MAXIMUM_BYTES} bytes.")
    if len(source) > MAXIMUM_TOKENS and sum(1 for _ in _TOKEN.finditer(source)) > MAXIMUM_TOKENS:
        return None
    return _parse(source, path.name)


def _parse(source: bytes, name: str) -> ast.Module:
    if b"\0" in source:
        raise TaskFamilyError(f"{name} is not Python, but binary: it has a NUL byte.")
    try:
        with _PARSING, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # bad escapes in the family's code are no concern of the operator
            return ast.parse(source, filename=name, feature_version=_MACHINE_PYTHON)
    except SyntaxError as error:
        raise TaskFamilyError(
            f"{name} is not valid Python: {error.msg} (line {error.lineno or 1}).",
            hint=f"Correct the line, or one above it, for Python {'.'.join(map(str, _MACHINE_PYTHON))}.",
        ) from None
    except (RecursionError, MemoryError, ValueError) as error:
        raise TaskFamilyError(f"{name} cannot be parsed as Python ({type(error).__name__}).") from None


def class_bindings(tree: ast.Module) -> list[ast.stmt]:
    """Returns the module's own statements that bind the name TaskFamily, or may."""
    return [node for node in statements(tree) if CLASS_NAME in bound_names(node)]


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yields the statements that run in a body's own scope, including those inside if, try, with and loops."""
    # Not recursive: each `elif` lies inside the one before, and a family may have thousands.
    open_nodes = [ast.iter_child_nodes(node)]
    while open_nodes:
        child = next(open_nodes[-1], None)
        if child is None:
            open_nodes.pop()
            continue
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case) and not _opens_a_scope(child):
            open_nodes.append(ast.iter_child_nodes(child))


def _opens_a_scope(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)


def bound_names(statement: ast.stmt) -> set[str]:
    """Returns the names that a statement binds. `import *` may bind the one we look for."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {statement.name}
    if isinstance(statement, ast.ImportFrom | ast.Import):
        bound = {alias.asname or alias.name for alias in statement.names}
        return bound | {CLASS_NAME} if "*" in bound else bound
    if isinstance(statement, ast.Assign):
        return {name.id for target in statement.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    if isinstance(statement, ast.AnnAssign) and statement.value and isinstance(statement.target, ast.Name):
        return {statement.target.id}
    return set()


def _methods(definition: ast.ClassDef) -> set[str]:
    return {name for statement in statements(definition) for name in bound_names(statement)}


def _may_have_get_tasks(definition: ast.ClassDef) -> bool:
    elsewhere = definition.bases or definition.keywords or definition.decorator_list
    return bool(elsewhere) or "get_tasks" in _methods(definition)


def _check_scoring(definition: ast.ClassDef, name: str) -> None:
    methods = _methods(definition)
    if {"score", "aggregate_scores"} <= methods and "intermediate_score" not in methods and not definition.bases:
        raise TaskFamilyError(
            f"The class {CLASS_NAME} in {name} (line {definition.lineno}) has both score and aggregate_scores, but no "
            "intermediate_score whose results could be aggregated."
        )
