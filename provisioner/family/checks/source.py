"""Tells what is certain about a family's class from its syntax tree. Never imports or runs the family's code.

Code can change a class after its definition. So nothing is certain where the module does more with the class than to
read its attributes. A value is known only if it is a literal.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from provisioner.family.loader import CLASS_NAME, TaskFamily, bound_names, class_bindings, parse_module, statements

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

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


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
        for statement in statements(self.definition) if self.definition else ():
            for name in bound_names(statement) | _stored(statement):
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


def read_source(family: TaskFamily) -> FamilySource | None:
    """Reads a family's module. Returns None if it is too large for that.

    Raises:
        TaskFamilyError: the module is not Python.
    """
    tree = parse_module(family.module)
    return FamilySource(family.module.name, tree, _plain_class(tree)) if tree else None


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
    bindings = class_bindings(tree)
    definition = bindings[0] if len(bindings) == 1 else None
    if not isinstance(definition, ast.ClassDef) or definition not in tree.body:
        return None
    if definition.decorator_list or definition.keywords or not all(map(_is_object, definition.bases)):
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


def _is_object(base: ast.expr) -> bool:
    return isinstance(base, ast.Name) and base.id == "object"


def _names(node: ast.AST) -> tuple[object, ...]:
    """Returns what a node uses as a name; a string may be one for getattr()."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=name):
            return (name,)
    return ()


def _stored(statement: ast.stmt) -> set[str]:
    """Returns the names that a statement binds in other ways than by a definition, an import or an assignment."""
    if isinstance(statement, ast.ClassDef | FunctionNode):
        return set()
    return {
        node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }
