"""Finds imports of a family's module that come too early: before install() can have brought what they name."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import PurePosixPath

from provisioner.family.checks.finding import Finding
from provisioner.family.checks.source import FamilySource
from provisioner.family.loader import TaskFamily
from provisioner.family.missing_modules import build_step
from provisioner.models import FileBuildStep, ShellBuildStep
from provisioner.validation import shown

MAXIMUM_COMMAND_CHARACTERS = 16 << 10

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


def import_findings(source: FamilySource, family: TaskFamily) -> Iterator[Finding]:
    """Yields imports at the top of the module that nothing can satisfy before install() has run."""
    scripts = ("\n".join(step.commands) for step in family.build_steps if isinstance(step, ShellBuildStep))
    if any(_INSTALLS.search(script[:MAXIMUM_COMMAND_CHARACTERS]) for script in scripts):
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
