"""Parses a family's module, and tells what is certain about its class. Never imports or runs the family's code.

Code can change a class after its definition. So nothing is certain where the module does more with the class than to
read its attributes. A value is known only if it is a literal.
"""

from __future__ import annotations

import ast
import re
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from provisioner.base.errors import TaskFamilyError, explained

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

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_SCOPES = ast.ClassDef | FunctionNode


@explained("methods")
def check_module(path: Path) -> None:
    """Checks that a module parses and has a class TaskFamily with get_tasks, as far as its source shows.

    A class that has bases, is imported or assigned may get its methods from other code: the machine checks it.

    Raises:
        TaskFamilyError: the module is too large, not Python, has no TaskFamily, or the class is not a task family.
    """
    tree = parse_module(path)
    if tree is None:
        return
    bindings = _class_bindings(tree)
    if not bindings:
        raise TaskFamilyError(f"{path.name} has no class {CLASS_NAME}.")
    classes = [node for node in bindings if isinstance(node, ast.ClassDef)]
    may_have_tasks = len(classes) < len(bindings)
    for definition in classes:
        methods = {name for statement in _statements(definition) for name in _bound_names(statement)}
        elsewhere = definition.bases or definition.keywords or definition.decorator_list
        may_have_tasks = may_have_tasks or bool(elsewhere) or "get_tasks" in methods
        aggregates = {"score", "aggregate_scores"} <= methods and "intermediate_score" not in methods
        if aggregates and not definition.bases:
            raise TaskFamilyError(
                f"The class {CLASS_NAME} in {path.name} (line {definition.lineno}) has both score and "
                "aggregate_scores, but no intermediate_score whose results could be aggregated."
            )
    if not may_have_tasks:
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
    if b"\0" in source:
        raise TaskFamilyError(f"{path.name} is not Python, but binary: it has a NUL byte.")
    try:
        with _PARSING, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # bad escapes in the family's code are no concern of the operator
            return ast.parse(source, filename=path.name, feature_version=_MACHINE_PYTHON)
    except SyntaxError as error:
        raise TaskFamilyError(
            f"{path.name} is not valid Python: {error.msg} (line {error.lineno or 1}).",
            hint=f"Correct the line, or one above it, for Python {'.'.join(map(str, _MACHINE_PYTHON))}.",
        ) from None
    except (RecursionError, MemoryError, ValueError) as error:
        raise TaskFamilyError(f"{path.name} cannot be parsed as Python ({type(error).__name__}).") from None


def _class_bindings(tree: ast.Module) -> list[ast.stmt]:
    """Returns the module's own statements that bind the name TaskFamily, or may."""
    return [node for node in _statements(tree) if CLASS_NAME in _bound_names(node)]


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
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
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case) and not isinstance(child, _SCOPES):
            open_nodes.append(ast.iter_child_nodes(child))


def _bound_names(statement: ast.stmt) -> set[str]:
    """Returns the names that a statement binds. `import *` may bind the one we look for."""
    if isinstance(statement, _SCOPES):
        return {statement.name}
    if isinstance(statement, ast.ImportFrom | ast.Import):
        bound = {alias.asname or alias.name for alias in statement.names}
        return bound | {CLASS_NAME} if "*" in bound else bound
    if isinstance(statement, ast.Assign):
        return {name.id for target in statement.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    if isinstance(statement, ast.AnnAssign) and statement.value and isinstance(statement.target, ast.Name):
        return {statement.target.id}
    return set()


# What the driver looks for in the class, beside its functions.
ATTRIBUTES = ("standard_version", "required_environment_variables", "skip_chown_after_start")
# The driver's calls: how many arguments each function gets. teardown() is also called without any.
FUNCTIONS = {
    "get_tasks": 0,
    "get_permissions": 1,
    "get_instructions": 1,
    "get_aux_vm_spec": 1,
    "install": 0,
    "start": 1,
    "score": 2,
    "intermediate_score": 1,
    "aggregate_scores": 2,
    "teardown": 1,
}

# Code that uses one of these can change the class without naming it.
_TAMPERING = frozenset({"exec", "eval", "globals", "locals", "vars", "setattr", "delattr"})
_DECORATORS = {"staticmethod": "static", "classmethod": "class"}


@dataclass(frozen=True)
class FamilySource:
    """A family's module, as its text shows it.

    Args:
        file: the module's name, for findings.
        tree: the module's syntax tree.
        definition: the class, if the driver certainly finds it as it is written; None otherwise.
    """

    file: str
    tree: ast.Module
    definition: ast.ClassDef | None

    @cached_property
    def members(self) -> dict[str, list[ast.stmt]]:
        """Returns the names that the class's body binds, with the statements that do; none if that is not certain."""
        members: dict[str, list[ast.stmt]] = defaultdict(list)
        for statement in _statements(self.definition) if self.definition else ():
            for name in _bound_names(statement) | _stored(statement):
                members[name].append(statement)
        return dict(members)

    def lacks(self, name: str) -> bool:
        """Returns whether the class certainly has nothing of a name."""
        return self.definition is not None and name not in self.members

    def function(self, name: str) -> FunctionNode | None:
        """Returns a function of the class; None if it is not certain, as when a decorator may have replaced it."""
        found = self._member(name)
        return found if isinstance(found, FunctionNode) and kind_of(found) is not None else None

    def attribute(self, name: str) -> ast.expr | None:
        """Returns the value of an attribute of the class that nothing else in the module names; None otherwise."""
        found = self._member(name)
        uses = sum(name in _names(node) for node in ast.walk(self.tree))
        return found.value if isinstance(found, ast.Assign | ast.AnnAssign) and uses == 1 else None

    def returned(self, name: str) -> ast.expr | None:
        """Returns the expression that is all that a function of the class returns; None if it does anything else."""
        function = self.function(name)
        if not isinstance(function, ast.FunctionDef):
            return None
        body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
        return body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None

    def _member(self, name: str) -> ast.stmt | None:
        """Returns the one statement of the class's body that binds a name; None if there are more, or other ways."""
        found = self.members.get(name, [])
        return found[0] if self.definition and len(found) == 1 and found[0] in self.definition.body else None


def read_source(module: Path) -> FamilySource | None:
    """Reads a family's module. Returns None if it is too large for that.

    Raises:
        TaskFamilyError: the module is not Python.
    """
    tree = parse_module(module)
    return FamilySource(module.name, tree, _plain_class(tree)) if tree else None


def kind_of(function: FunctionNode) -> str | None:
    """Returns `static`, `class` or `plain`: how the class hands a function out. None with other decorators."""
    if not function.decorator_list:
        return "plain"
    decorator = function.decorator_list[0]
    if len(function.decorator_list) > 1 or not isinstance(decorator, ast.Name):
        return None
    return _DECORATORS.get(decorator.id)


def strings(node: ast.expr | None) -> list[str] | None:
    """Returns the elements of a list, tuple or set of strings; None if it is anything else."""
    if not isinstance(node, ast.List | ast.Tuple | ast.Set):
        return None
    found = [each.value for each in node.elts if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return found if len(found) == len(node.elts) else None


def _plain_class(tree: ast.Module) -> ast.ClassDef | None:
    """Returns the class if the driver finds it just as it is written."""
    bindings = _class_bindings(tree)
    definition = bindings[0] if len(bindings) == 1 else None
    if not isinstance(definition, ast.ClassDef) or definition not in tree.body:
        return None
    if definition.decorator_list or definition.keywords:
        return None
    if not all(isinstance(base, ast.Name) and base.id == "object" for base in definition.bases):
        return None
    named = 0
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), ctx=ast.Load()) if name == CLASS_NAME:
                named -= 1  # a read, whose name is counted below
            case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()) if name in FUNCTIONS or name in ATTRIBUTES:
                return None
            case ast.Name(id=name) if name in _TAMPERING:
                return None
            case ast.Name(id=name) if name == CLASS_NAME:
                named += 1
    return definition if named == 0 else None


def _names(node: ast.AST) -> tuple[object, ...]:
    """Returns what a node uses as a name; a string may be one for getattr()."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=name):
            return (name,)
    return ()


def _stored(statement: ast.stmt) -> set[str]:
    """Returns the names that a statement binds in other ways than by a definition, an import or an assignment."""
    if isinstance(statement, _SCOPES):
        return set()
    return {
        node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }
