"""Reads, checks and hashes a task family's directory, and parses its module. Never imports or runs its code."""

from __future__ import annotations

import ast
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from provisioner.errors import TaskFamilyError
from provisioner.family.build_steps import check_build_steps, load_build_steps, with_reads
from provisioner.family.explained import FILES, METHODS, explained
from provisioner.family.files import list_files
from provisioner.family.manifest import Manifest, load_manifest
from provisioner.models import BuildStep, Role
from provisioner.validation import shown

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


__all__ = ["TaskFamily", "check_build_steps", "load_family", "refuse_env_file_inside"]

MAXIMUM_NAME_CHARACTERS = 64
# Of a directory in which a family may be meant that a path does not name.
ENTRIES_LOOKED_AT = 1000

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class TaskFamily:
    """A task family whose directory has passed all checks.

    Args:
        directory: the resolved path.
        name: the directory's name, in snake case.
        module: the path of its NAME.py.
        manifest: from manifest.yaml, or the defaults.
        build_steps: from build_steps.json, or none.
        files: the files to copy into machines: sorted paths relative to `directory`, of regular files and of links
            that stay inside. family.files.SKIPPED_NAMES, SKIPPED_AT_TOP and empty directories are left out.
        hostname: its machine's host name; empty for its role. Only our own families have one.
        neighbours: further machines of each environment, by role. Each has the image of such a family, and nothing of
            it runs there. Only our own families have any.
    """

    directory: Path
    name: str
    module: Path
    manifest: Manifest
    build_steps: tuple[BuildStep, ...]
    files: tuple[str, ...]
    hostname: str = ""
    neighbours: Mapping[Role, TaskFamily] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What messages call it: its name, or the machine that it is made for."""
        return f"machine {self.hostname}" if self.hostname else self.name


def load_family(path: Path) -> TaskFamily:
    """Loads and checks a task family.

    Args:
        path: the family's directory. If it is a link, the family takes the link's name.

    Raises:
        TaskFamilyError: the directory is not a valid task family; the message names the file and the problem.
    """
    directory, name, files = locate_family(path)
    module = directory / f"{name}.py"
    check_module(module)
    steps = with_reads(load_build_steps(directory), directory, files)
    return TaskFamily(directory, name, module, load_manifest(directory), steps, files)


def locate_family(path: Path) -> tuple[Path, str, tuple[str, ...]]:
    """Checks a family's directory, but not what its files hold.

    Returns:
        the resolved directory, the family's name, and the files to copy into machines.

    Raises:
        TaskFamilyError: there is no such directory, its name or a file in it is not allowed, or it has no NAME.py.
    """
    path = path.resolve() if ".." in path.parts else path.absolute()
    if not path.is_dir():
        problem = "is not a directory" if path.exists() else "does not exist"
        near = _family_near(path)
        hint = f"Perhaps {near}?" if near else None
        raise TaskFamilyError(f"{path} {problem}: a task family is a directory NAME with a file NAME.py.", hint=hint)
    with explained(FILES):
        name = family_name(path)
        directory = path.resolve()
        files = list_files(directory)  # first, so that whatever is read below is a regular file or a link to one
        if not (directory / f"{name}.py").is_file():
            inside = _families_in(path)
            hint = f"There are families in it, such as {inside[0]}." if inside else None
            raise TaskFamilyError(f"{path} has no {name}.py, the module that a family of this name needs.", hint=hint)
        return directory, name, files


def _family_near(path: Path) -> Path | None:
    """Returns the family that a path may mean: the one that holds it, or one beside it with a similar name."""
    if _is_family(path.parent):
        return path.parent
    names = [each.name for each in _families_in(path.parent)]
    return next((path.parent / name for name in get_close_matches(path.name, names, n=1)), None)


def _families_in(directory: Path) -> list[Path]:
    try:
        return sorted(filter(_is_family, islice(directory.iterdir(), ENTRIES_LOOKED_AT)))
    except OSError:
        return []


def _is_family(path: Path) -> bool:
    try:
        return (path / f"{path.name}.py").is_file()
    except OSError:  # such as a name that leaves no room for .py
        return False


def family_name(path: Path) -> str:
    """Returns the name of the family in a directory.

    Raises:
        TaskFamilyError: the directory's name is not a valid family name.
    """
    name = path.absolute().name
    if not _NAME.fullmatch(name):
        raise TaskFamilyError(
            f"The directory's name {shown(name)} is not a valid family name: use a lower-case letter, followed by "
            "lower-case letters, digits and _."
        )
    if len(name) > MAXIMUM_NAME_CHARACTERS:
        raise TaskFamilyError(f"The family's name {shown(name)} has over {MAXIMUM_NAME_CHARACTERS} characters.")
    return name


def refuse_env_file_inside(family: TaskFamily, env_file: Path) -> None:
    """Checks that the env file is not one of the files that would be copied into the image, secrets and all.

    Raises:
        TaskFamilyError: the env file is one of the family's files.
    """
    resolved = env_file.resolve()
    if any((family.directory / name).resolve() == resolved for name in family.files):
        raise TaskFamilyError(
            f"The env file {env_file} is one of the family's files, so its secrets would be copied into the image.",
            hint="Move it out of the family's directory.",
        )
