"""Hashes what of a family's module some of its functions can reach. Never imports or runs the module.

A change of score() changes nothing for install(), though both are in one file. So the body of a function counts only if
its name is mentioned in what counts: in what runs when the module is imported, in the functions that are asked about,
and in what those mention. Where the text does not show what is reached, all of it counts.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Collection, Iterator
from hashlib import sha256
from pathlib import Path, PurePosixPath

from provisioner.family.module import CLASS_NAME, parse_module

# What reads the setup data calls these. Attributes of the class always count.
SETUP = ("get_tasks", "get_permissions", "get_instructions", "get_aux_vm_spec")
INSTALL = ("install",)
MAXIMUM_PROGRAMS = 2000
MAXIMUM_MODULE_BYTES = 1 << 20

# With one of these, code may reach what it does not name.
_DYNAMIC = frozenset(
    {"__builtins__", "__dict__", "__getattribute__", "__globals__", "__import__", "_getframe", "ast", "attrgetter",
     "delattr", "dir", "eval", "exec", "f_globals", "f_locals", "gc", "get_objects", "getattr", "getmembers", "globals",
     "importlib", "inspect", "linecache", "locals", "methodcaller", "modules", "pickle", "pkgutil", "runpy", "setattr",
     "tokenize", "vars"}
)  # fmt: skip
_WORD = re.compile(r"\w+")
# What runs a module that it names, and how far before the name it may stand: names may be on lines of their own.
_IMPORT = re.compile(rb"\b(?:from|import|import_module|__import__|run_path|run_module|exec)\b")
IMPORT_BYTES = 300
# python3 -m NAME, also as words of a list.
_RUN_AS_MODULE = re.compile(rb"-\w*m[\s\"',]*\Z")
# A module that names the family's more often may import it anywhere.
MAXIMUM_MENTIONS = 1000
_COMPILED = (".pyc", ".so")
_TESTS = re.compile(r"(test_.*|.*_test|conftest)\.py")
# What is surely a program, and what surely is none. Programs also have other names, such as Makefile or setup.
_PROGRAMS = (".py", ".sh")
_DATA = (
    ".bin", ".bz2", ".csv", ".db", ".gif", ".gz", ".html", ".img", ".iso", ".jpeg", ".jpg", ".json", ".jsonl", ".md",
    ".mp3", ".mp4", ".npy", ".npz", ".parquet", ".pcap", ".pdf", ".png", ".qcow2", ".rst", ".sqlite", ".svg", ".tar",
    ".tgz", ".tsv", ".txt", ".wav", ".webp", ".xz", ".yaml", ".yml", ".zip", ".zst",
)  # fmt: skip

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def reached_digest(directory: Path, name: str, files: Collection[str], functions: Collection[str]) -> str:
    """Returns a hash of what of a family's module runs on import, or when some functions of its class are called.

    Args:
        directory: the family's.
        name: the family's name; its module is NAME.py.
        files: those of the family that may be there; another module of it may call anything in this one.
        functions: the names of the functions.

    Raises:
        TaskFamilyError: the module is too large, or not Python.
    """
    path = directory / f"{name}.py"
    whole = sha256(path.read_bytes()).hexdigest()
    tree = parse_module(path)
    if tree is None or _is_completed_elsewhere(tree) or _is_imported(directory, name, files):
        return whole
    try:
        bodies = _bodies(tree, functions)
        counted = _counted(tree, bodies, name)
        if counted is None:
            return whole
        for function, body in bodies:
            function.body = body if function in counted else []
        return sha256(ast.dump(tree, annotate_fields=False).encode()).hexdigest()
    except RecursionError:
        return whole


def _is_completed_elsewhere(tree: ast.Module) -> bool:
    """Whether code of another module may call the class's functions by their names: that of a base, or a decorator."""
    own = {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}
    open_classes = [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == CLASS_NAME]
    seen: set[str] = set()
    while open_classes:
        definition = open_classes.pop()
        if definition.keywords or definition.decorator_list:
            return True
        for base in definition.bases:
            name = base.id if isinstance(base, ast.Name) else ""
            if name not in own:
                if name == "object":
                    continue
                return True
            if name not in seen:
                seen.add(name)
                open_classes.append(own[name])
    return False


def _bodies(tree: ast.Module, functions: Collection[str]) -> list[tuple[_Function, list[ast.stmt]]]:
    """Returns the functions of the module and of its class that need not count, and takes their bodies out."""
    classes = [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == CLASS_NAME]
    inner = [each for definition in classes for each in definition.body if getattr(each, "name", "") not in functions]
    candidates = [each for each in (*tree.body, *inner) if isinstance(each, _Function)]
    taken = [(each, each.body) for each in candidates if not each.name.startswith("__")]
    for function, _ in taken:
        function.body = []
    return taken


def _counted(tree: ast.Module, bodies: list[tuple[_Function, list[ast.stmt]]], module: str) -> set[_Function] | None:
    """Returns the functions whose bodies count; None if that cannot be told."""
    by_name: dict[str, list[tuple[_Function, list[ast.stmt]]]] = {}
    for function, body in bodies:
        by_name.setdefault(function.name, []).append((function, body))
    counted: set[_Function] = set()
    new = set(_names(tree, module))
    names = set(new)
    while new:
        if not _DYNAMIC.isdisjoint(new):
            return None
        found = [each for name in new for each in by_name.get(name, ())]
        counted.update(function for function, _ in found)
        mentioned = {name for _, body in found for statement in body for name in _names(statement, module)}
        new = mentioned - names
        names |= new
    return counted


def _names(node: ast.AST, module: str) -> Iterator[str]:
    """Yields all names that code mentions; not those under which it defines functions.

    A string, or one of bytes, is a name, or a program of its own if it names the module.
    """
    for each in ast.walk(node):
        match each:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield name
            case ast.Constant(value=str() | bytes() as value):
                text = value if isinstance(value, str) else value.decode("latin-1")
                words = _WORD.findall(text)
                yield from words if module in words else [text]
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (alias.name.partition(".")[0] for alias in aliases)
                yield from (alias.asname for alias in aliases if alias.asname)
                if isinstance(each, ast.ImportFrom) and each.module:
                    yield each.module.partition(".")[0]


def _is_imported(directory: Path, name: str, files: Collection[str]) -> bool:
    """Whether another program may use the family's module.

    Tests run after start(), and do not count unless another program names them.
    """
    others = [each for each in files if not each.endswith(_DATA) and each != f"{name}.py"]
    if len(others) > MAXIMUM_PROGRAMS or any(each.endswith(_COMPILED) for each in files):
        return True
    tests = {each for each in others if _TESTS.fullmatch(PurePosixPath(each).name)}
    mention, of_test = _mention({name}), _mention({PurePosixPath(each).stem for each in tests})
    named = set(of_test.findall((directory / f"{name}.py").read_bytes()))
    for each in set(others) - tests:
        text = _beginning(directory / each)
        if len(text) > MAXIMUM_MODULE_BYTES and each.endswith(_PROGRAMS):
            return True
        # Looked for before the expression is, which takes a hundred times as long.
        if os.fsencode(name) in text and _may_import(text, mention):
            return True
        named.update(of_test.findall(text) if tests else ())
    run = [each for each in tests if os.fsencode(PurePosixPath(each).stem) in named]
    return any(_may_import(_beginning(directory / each), mention) for each in run)


def _beginning(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(MAXIMUM_MODULE_BYTES + 1)


def _mention(names: Collection[str]) -> re.Pattern[bytes]:
    """Returns what finds any of some names as a word; nothing without names."""
    words = b"|".join(re.escape(os.fsencode(name)) for name in names)
    return re.compile(rb"\b(?:" + words + rb")\b" if names else rb"(?!)")


def _may_import(text: bytes, mention: re.Pattern[bytes]) -> bool:
    """Whether a program seems to run a module. Takes a time that does not grow faster than its text.

    A directory of a path, as in /srv/NAME/data, is none: services are often named after their family.
    """
    for number, found in enumerate(mention.finditer(text)):
        if number >= MAXIMUM_MENTIONS or text.startswith(b".py", found.end()):
            return True
        if text[found.start() - 1 : found.start()] == b"/" == text[found.end() : found.end() + 1]:
            continue
        before = text[max(0, found.start() - IMPORT_BYTES) : found.start()]
        if _IMPORT.search(before) or _RUN_AS_MODULE.search(before):
            return True
    return False
