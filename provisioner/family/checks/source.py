"""Tells what is certain about a family's class from its syntax tree. Never imports or runs the family's code.

Python can change a class from anywhere. So a class is read only if nothing in its module could, and a value only if it
is written as a literal and used nowhere else.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from provisioner.family.loader import TaskFamily
from provisioner.family.module import CLASS_NAME, bound_names, class_bindings, parse_module, statements

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
MAXIMUM_OTHER_MODULES = 200
MAXIMUM_OTHER_MODULE_BYTES = 1 << 20

# Code that uses one of these can change the class, or the module, without naming what.
_TAMPERING = frozenset({"exec", "eval", "globals", "locals", "vars", "setattr", "delattr", "__builtins__"})
_TAMPERING_ELSEWHERE = re.compile(rb"setattr|" + CLASS_NAME.encode() + rb"\s*\.\s*\w+\s*=(?!=)")
_DECORATORS = {"staticmethod": "static", "classmethod": "class"}
# Uses of a dict that leave it as it is.
_READING = frozenset({"items", "keys", "values", "get", "copy"})

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class FamilySource:
    """A family's module, as its text shows it.

    Args:
        file: the module's name, for findings.
        tree: the module's syntax tree.
        nodes: all nodes of the tree.
        definition: the class, if it is certain that the driver finds it as it is written; None otherwise.
    """

    file: str
    tree: ast.Module
    nodes: list[ast.AST]
    definition: ast.ClassDef | None

    @cached_property
    def _names(self) -> Counter[str | None]:
        return Counter(map(_name_of, self.nodes))

    @cached_property
    def _members(self) -> dict[str, list[ast.stmt]]:
        members: dict[str, list[ast.stmt]] = defaultdict(list)
        for statement in statements(self.definition) if self.definition else ():
            for name in bound_names(statement) | _stored(statement):
                members[name].append(statement)
        return members

    @property
    def member_names(self) -> set[str]:
        """Returns the names of what the class defines, as far as it is certain."""
        return set(self._members)

    def lacks(self, name: str) -> bool:
        """Returns whether it is certain that the class has nothing of a name."""
        return self.definition is not None and name not in self._members

    def member(self, name: str) -> ast.stmt | None:
        """Returns the one statement in the class's body that defines a name; None if it is not certain."""
        found = self._members.get(name, [])
        return found[0] if self.definition and len(found) == 1 and found[0] in self.definition.body else None

    def function(self, name: str) -> FunctionNode | None:
        """Returns a function of the class; None if it is not certain, as when a decorator may have replaced it."""
        found = self.member(name)
        if not isinstance(found, FunctionNode):
            return None
        return found if kind_of(found) is not None else None

    def attribute(self, name: str) -> ast.expr | None:
        """Returns the value of an attribute of the class that nothing else in the module names; None otherwise."""
        value = _assigned(self.member(name)) if self._names[name] == 1 else None
        return self._constant(value, name) if isinstance(value, ast.Name) else value

    def returned(self, name: str) -> ast.expr | None:
        """Returns the expression that is all that a function of the class returns; None if it does anything else."""
        function = self.function(name)
        if not isinstance(function, ast.FunctionDef):
            return None
        body = function.body[1:] if _is_docstring(function.body[0]) else function.body
        if len(body) != 1 or not isinstance(body[0], ast.Return) or body[0].value is None:
            return None
        value = body[0].value
        return self._constant(value, name) if isinstance(value, ast.Name) else value

    def iterated(self, comprehension: ast.DictComp) -> ast.expr | None:
        """Returns what a comprehension has a key for each element of, and none beside; None if it is not certain."""
        generator = comprehension.generators[0]
        key, target = comprehension.key, generator.target
        each = isinstance(key, ast.Name) and isinstance(target, ast.Name) and key.id == target.id
        if not each or len(comprehension.generators) > 1 or generator.ifs or generator.is_async:
            return None
        iterable = generator.iter
        return self._constant(iterable, "", uses=0) if isinstance(iterable, ast.Name) else iterable

    def _constant(self, used: ast.Name, function: str, uses: int = 1) -> ast.expr | None:
        """Returns the value of a name of the module, if it is bound once and all other uses only read it.

        Args:
            function: the function that hands the value out; empty for none.
            uses: how many uses do not only read it, and are known to leave it as it is.
        """
        name = used.id
        bindings = [node for node in self.tree.body if name in bound_names(node)]
        value = _assigned(bindings[0]) if len(bindings) == 1 else None
        reads = sum(_only_reads(node, name) for node in self.nodes)
        # A caller of the function gets the dict itself, and could change it.
        called = sum(isinstance(node, ast.Attribute) and node.attr == function for node in self.nodes)
        return value if self._names[name] == reads + uses + 1 and not called else None


def read_source(family: TaskFamily) -> FamilySource | None:
    """Reads a family's module. Returns None if it is too large for that.

    Raises:
        TaskFamilyError: the module is not Python.
    """
    tree = parse_module(family.module)
    if tree is None:
        return None
    nodes = list(ast.walk(tree))
    definition = _plain_class(tree, nodes)
    if definition and _is_changed_elsewhere(family):
        definition = None
    return FamilySource(family.module.name, tree, nodes, definition)


def kind_of(function: FunctionNode) -> str | None:
    """Returns `static`, `class` or `plain`: how the class hands a function out. None with other decorators."""
    if not function.decorator_list:
        return "plain"
    decorator = function.decorator_list[0]
    if len(function.decorator_list) > 1 or not isinstance(decorator, ast.Name):
        return None
    return _DECORATORS.get(decorator.id)


def literal(node: ast.expr | None) -> Any:
    """Returns the value of a literal.

    Raises:
        ValueError: the node is none.
    """
    if node is None:
        raise ValueError("no literal")
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("no literal") from error


def strings(node: ast.expr | None) -> list[ast.Constant] | None:
    """Returns the elements of a list, tuple or set of strings; None if it is anything else."""
    if not isinstance(node, ast.List | ast.Tuple | ast.Set):
        return None
    found = [element for element in node.elts if isinstance(element, ast.Constant) and isinstance(element.value, str)]
    return found if len(found) == len(node.elts) else None


def _plain_class(tree: ast.Module, nodes: list[ast.AST]) -> ast.ClassDef | None:
    """Returns the class if the driver finds it just as it is written."""
    bindings = class_bindings(tree)
    definition = bindings[0] if len(bindings) == 1 else None
    if not isinstance(definition, ast.ClassDef) or definition not in tree.body:
        return None
    if definition.decorator_list or definition.keywords or not all(map(_is_object, definition.bases)):
        return None
    reads = sum(_reads_attribute(node) for node in nodes)
    named = sum(_name_of(node) == CLASS_NAME for node in nodes)
    changed = any(map(_may_change_a_class, nodes))
    return definition if not changed and named == reads + 1 else None


def _assigned(statement: ast.stmt | None) -> ast.expr | None:
    """Returns what a statement assigns to one name and to nothing else."""
    if isinstance(statement, ast.Assign):
        return statement.value if len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name) else None
    return statement.value if isinstance(statement, ast.AnnAssign) else None


def _is_object(base: ast.expr) -> bool:
    return isinstance(base, ast.Name) and base.id == "object"


def _reads_attribute(node: ast.AST) -> bool:
    """Returns whether a node is `TaskFamily.attribute`, only read."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == CLASS_NAME
        and isinstance(node.ctx, ast.Load)
        and node.attr not in ("__dict__", "__class__")
    )


def _may_change_a_class(node: ast.AST) -> bool:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return node.id in _TAMPERING
    if _name_of(node) in _DECORATORS:  # it is bound anew
        return True
    if isinstance(node, ast.Attribute):
        ours = node.attr in FUNCTIONS or node.attr in ATTRIBUTES
        hidden = node.attr == "modules" and isinstance(node.value, ast.Name) and node.value.id == "sys"
        return hidden or (ours and not isinstance(node.ctx, ast.Load))
    return isinstance(node, ast.alias) and node.name in _TAMPERING | {"modules", "builtins"}


def _name_of(node: ast.AST) -> str | None:
    """Returns the name that a node uses or binds, whatever it does with it; a string may be one for getattr()."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.ClassDef | FunctionNode):
        return node.name
    if isinstance(node, ast.alias):
        return node.asname or node.name
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        return node.name
    return None


def _stored(statement: ast.stmt) -> set[str]:
    """Returns the names that a statement binds in other ways than by a definition, an import or an assignment."""
    if isinstance(statement, ast.ClassDef | FunctionNode):
        return set()
    return {
        node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }


def _only_reads(node: ast.AST, name: str) -> bool:
    """Returns whether a node is a use of a dict's name that leaves the dict and its values as they are."""
    if isinstance(node, ast.Attribute):
        return _is_name(node.value, name) and node.attr in _READING and isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Subscript):
        return _is_name(node.value, name) and isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.comprehension | ast.For):
        return _is_name(node.iter, name)
    return isinstance(node, ast.Compare) and any(_is_name(compared, name) for compared in node.comparators)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_changed_elsewhere(family: TaskFamily) -> bool:
    """Returns whether another of the family's modules may change the class when it is imported."""
    names = [name for name in family.files if name.endswith(".py") and not _is_test(Path(name).name)]
    others = [path for name in names if (path := family.directory / name) != family.module and path.is_file()]
    return len(others) > MAXIMUM_OTHER_MODULES or any(map(_may_change_the_class, others))


def _is_test(name: str) -> bool:
    return name.startswith("test_") or name.endswith("_test.py")


def _may_change_the_class(module: Path) -> bool:
    with module.open("rb") as file:
        text = file.read(MAXIMUM_OTHER_MODULE_BYTES + 1)
    too_long = len(text) > MAXIMUM_OTHER_MODULE_BYTES
    return too_long or (CLASS_NAME.encode() in text and _TAMPERING_ELSEWHERE.search(text) is not None)
