"""Looks at the packages that a family installs and imports: unpinned versions, and imports that come too early."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import PurePosixPath

from provisioner.family.checks.finding import Finding
from provisioner.family.checks.shell import Script
from provisioner.family.checks.source import FamilySource
from provisioner.family.loader import TaskFamily
from provisioner.family.missing_modules import build_step
from provisioner.models import FileBuildStep
from provisioner.validation import shown

MAXIMUM_COMMAND_CHARACTERS = 16 << 10
MAXIMUM_COMMANDS = 2000

# What the primary machine's Python has, beside its standard library (base_image/python/packages.txt).
_INSTALLED = frozenset(
    {"metr_task_standard", "pip", "setuptools", "pkg_resources", "wheel", "pytest", "_pytest", "pluggy", "iniconfig",
     "packaging", "attr", "attrs"}
)  # fmt: skip
# Modules that Python 3.12 and 3.13 no longer have, but the machine's Python 3.11 does.
_OF_PYTHON_311 = frozenset(
    {"aifc", "asynchat", "asyncore", "audioop", "cgi", "cgitb", "chunk", "crypt", "distutils", "imghdr", "imp",
     "lib2to3", "mailcap", "msilib", "nis", "nntplib", "ossaudiodev", "pipes", "smtpd", "sndhdr", "spwd", "sunau",
     "telnetlib", "uu", "xdrlib"}
)  # fmt: skip
# Build steps that may bring modules, or run a program that does.
_INSTALLS = re.compile(r"\b(pip[\d.]*|uv|conda|poetry|apt|apt-get|install|python[\d.]*|sh|bash|make|source)\b|\./")
# What is said, not done.
_SAYS = re.compile(r"print|debug|info|warning|error|exception|log|fail|skip|\w*(Error|Exception|Exit)")

_PIP = re.compile(r"pip(3(\.\d+)?)?")
_SEPARATORS = re.compile(r"\n|&&|\|\||;|\||\(|\)")
_FILES = (".whl", ".tar.gz", ".zip")
# Options of `pip install` that are followed by a value, and those that pin by a file.
_WITH_VALUE = frozenset(
    {"-t", "--target", "-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--prefix", "--root",
     "--python", "--proxy", "--timeout", "--retries", "--log", "--platform", "--python-version", "--abi",
     "--implementation", "--no-binary", "--only-binary", "--progress-bar", "--src", "--report", "--upgrade-strategy",
     "--cert", "--cache-dir", "-C", "--config-settings", "--trusted-host", "-e", "--editable", "-r", "--requirement"}
)  # fmt: skip
_CONSTRAINTS = ("-c", "--constraint", "--constraints")
# Their versions hardly ever change a score.
_TOOLS = ("pip", "setuptools", "wheel")
# Stands for what is computed.
_UNKNOWN = "\0"


def import_findings(source: FamilySource, family: TaskFamily, scripts: Iterable[Script]) -> Iterator[Finding]:
    """Yields imports at the top of the module that nothing can satisfy before install() has run."""
    if any(_INSTALLS.search(script.text[:MAXIMUM_COMMAND_CHARACTERS]) for script in scripts if script.shell == "bash"):
        return  # build steps run before the first import, and a package may bring any module
    own = {part.partition(".")[0] for name in family.files for part in PurePosixPath(name).parts}
    own |= {PurePosixPath(step.destination).stem for step in family.build_steps if isinstance(step, FileBuildStep)}
    present = own | sys.stdlib_module_names | _OF_PYTHON_311 | _INSTALLED
    for statement in source.tree.body:
        for name in _imported(statement):
            if name not in present:
                yield Finding(
                    "warning", "import-before-install", source.file, statement.lineno,
                    f"The module imports {shown(name)} at its top.",
                    "The machine's Python has no such module, and install() belongs to this module, so it cannot run "
                    "before the import.",
                    "Import it inside the functions that use it, or install it by a step in build_steps.json: "
                    f"{build_step(name)}.",
                )  # fmt: skip


def _imported(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        return [statement.module.partition(".")[0]]
    return []


def unpinned_findings(source: FamilySource | None, scripts: Iterable[Script]) -> Iterator[Finding]:
    """Yields packages that pip installs in whatever version is newest when the image is built."""
    for script in scripts:
        for index, command in enumerate(script.commands[:MAXIMUM_COMMANDS]):
            for package in _unpinned_in_text(command):
                yield _unpinned(script.file, script.place_of(index), package)
    if source:
        calls = (node for node in source.nodes if isinstance(node, ast.Call))
        for call in islice(calls, MAXIMUM_COMMANDS):
            for package in _unpinned_in_call(call):
                yield _unpinned(source.file, call.lineno, package)


def _unpinned(file: str, line: int | None, package: str) -> Finding:
    name = re.split(r"[<>=!~;@ ]", package)[0]
    return Finding(
        "warning", "unpinned-package", file, line, f"pip installs {shown(package)}, which is not pinned.",
        "Images that are built at different times have different versions of it, which may change scores.",
        f"Write {name[:80]}@COMMIT." if package.startswith("git+") else f"Write {name[:80]}==VERSION.",
    )  # fmt: skip


def _unpinned_in_call(call: ast.Call) -> list[str]:
    """Looks at a call whose first argument is a command, as a list or a string, or whose arguments are one."""
    first = call.args[0] if call.args else None
    name = getattr(call.func, "attr", None) or getattr(call.func, "id", None)
    if name and _SAYS.fullmatch(name):
        return []
    if isinstance(first, ast.List | ast.Tuple):
        return _unpinned_in_words([_text(element) for element in first.elts])
    if isinstance(first, ast.JoinedStr) or (isinstance(first, ast.Constant) and isinstance(first.value, str)):
        text = _text(first)
        return _unpinned_in_text(text) or _unpinned_in_words([_text(argument) for argument in call.args])
    return []


def _text(node: ast.expr) -> str:
    """Returns a string, with a mark in place of what is computed."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else _UNKNOWN


def _unpinned_in_text(text: str) -> list[str]:
    if "pip" not in text or len(text) > MAXIMUM_COMMAND_CHARACTERS:
        return []
    found = []
    for command in _SEPARATORS.split(text):
        try:
            found += _unpinned_in_words(shlex.split(command, comments=True))
        except ValueError:
            continue  # a quote that continues in the next line
    return found


def _unpinned_in_words(words: list[str]) -> list[str]:
    """Returns the packages without a version that a command has pip install."""
    pip = next((at for at, word in enumerate(words) if _PIP.fullmatch(PurePosixPath(word).name)), None)
    if pip is None or "install" not in words[pip + 1 :]:
        return []
    arguments = words[words.index("install", pip + 1) + 1 :]
    if any(word.partition("=")[0] in _CONSTRAINTS for word in arguments):
        return []
    packages, is_value = [], False
    for word in arguments:
        if not is_value and not word.startswith("-") and not _is_pinned(word):
            packages.append(word)
        is_value = word in _WITH_VALUE
    return packages


def _is_pinned(word: str) -> bool:
    """Returns whether an argument of `pip install` names one version, a file, or what only the machine knows."""
    if word.startswith("git+"):
        return "@" in word.rpartition("/")[2]
    if word in _TOOLS:
        return True
    computed = any(sign in word for sign in (_UNKNOWN, "$", "`", "*"))
    place = "/" in word or word.startswith(".") or word.endswith(_FILES)
    return computed or place or "==" in word or not word or word[0] in "<>&0123456789"
