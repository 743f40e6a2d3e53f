"""Finds imports at the top of a family's module that no machine can satisfy, and globs that match no file."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import PurePosixPath

from provisioner.family.build_steps import PIP_STEP
from provisioner.family.checks.finding import Finding
from provisioner.family.checks.source import FamilySource
from provisioner.family.files import matching
from provisioner.family.loader import TaskFamily
from provisioner.family.manifest import FILE_NAMES
from provisioner.models import FileBuildStep
from provisioner.validation import shown

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


def import_findings(source: FamilySource, family: TaskFamily) -> Iterator[Finding]:
    """Yields imports at the top of the module of what the machine does not have before install() has run."""
    own = {part.partition(".")[0] for name in family.files for part in PurePosixPath(name).parts}
    own |= {PurePosixPath(step.destination).stem for step in family.build_steps if isinstance(step, FileBuildStep)}
    present = own | sys.stdlib_module_names | _OF_PYTHON_311 | _INSTALLED
    # Steps run before the first import, and a command may install any module.
    may_be_installed = any(not isinstance(step, FileBuildStep) for step in family.build_steps)
    globs = family.manifest.install_inputs
    seen = family.files if globs is None else {*matching(globs, family.files), family.module.name}
    for statement in source.tree.body:
        for name in _imported(statement):
            files = {f"{name}.py", f"{name}/__init__.py"} & set(family.files)
            if files and files.isdisjoint(seen):
                yield Finding(
                    "error", "import-before-install", source.file, statement.lineno,
                    f"The module imports {shown(name)} at its top, and install_inputs leaves {min(files)} out.",
                    "install() belongs to this module, and so does not run without it.",
                    f"Add {shown(min(files))} to install_inputs, or import it inside the functions that use it.",
                )  # fmt: skip
            elif name not in present and not may_be_installed:
                yield Finding(
                    "warning", "import-before-install", source.file, statement.lineno,
                    f"The module imports {shown(name)} at its top.",
                    "The machine's Python has no such module, and install() belongs to this module, so it cannot run "
                    "before the import.",
                    "Import it inside the functions that use it, or install it by a step in build_steps.json: "
                    f"{PIP_STEP}.",
                )  # fmt: skip


def glob_findings(family: TaskFamily) -> Iterator[Finding]:
    """Yields globs of install_inputs that match no file."""
    manifest = next((name for name in FILE_NAMES if name in family.files), "")
    for glob in family.manifest.install_inputs or ():
        if not matching([glob], family.files):
            yield Finding(
                "warning", "unmatched-glob", manifest, None,
                f"install_inputs has {shown(glob)}, which matches no file.",
                "install() sees none of the files that it may have been meant for.",
                "Correct or remove it. `dir/**` is all that lies below a directory.",
            )  # fmt: skip


def _imported(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        return [statement.module.partition(".")[0]]
    return []
