"""Checks the tasks' and the required variables' names, where the class has them as literals."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from provisioner.family.checks.finding import Finding
from provisioner.family.checks.source import FamilySource, strings
from provisioner.family.env_file import AUX_VM_VARIABLES
from provisioner.family.loader import TaskFamily
from provisioner.family.manifest import FILE_NAMES
from provisioner.family.setup_data import closest
from provisioner.validation import shown

_VARIABLES = "required_environment_variables"
_SHOWN = 20


def task_names(source: FamilySource) -> tuple[str, ...] | None:
    """Returns the names of the tasks, or None if get_tasks does more than to return a dict of literal names."""
    value = source.returned("get_tasks")
    if not isinstance(value, ast.Dict):
        return None
    names = [key.value for key in value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return tuple(dict.fromkeys(names)) if names and len(names) == len(value.keys) else None


def required_variables(source: FamilySource) -> list[str]:
    """Returns the variables that the family certainly requires of the env file."""
    ours: tuple[str, ...] = () if source.lacks("get_aux_vm_spec") else AUX_VM_VARIABLES
    names = strings(source.attribute(_VARIABLES)) or ()
    return [name for name in dict.fromkeys(names) if name not in ours]


def task_findings(source: FamilySource, family: TaskFamily, task: str | None) -> Iterator[Finding]:
    """Yields tasks that get_tasks does not have: of the manifest, and the one that is to run."""
    tasks = task_names(source)
    if tasks is None:
        return
    known = set(tasks)
    manifest = next((name for name in FILE_NAMES if name in family.files), "")
    unknown = [name for name in family.manifest.tasks if name not in known]
    for name in unknown[:_SHOWN]:
        yield Finding(
            "warning", "unknown-manifest-task", manifest, _line_of_key(family.directory / manifest, name),
            f"The manifest names the task {shown(name)}, which get_tasks does not have.",
            "Its resources and scoring are for no task.",
            f"Remove it, or correct its name. get_tasks has {_listed(tasks)}.",
        )  # fmt: skip
    if task is not None and task not in known:
        function = source.function("get_tasks")
        yield Finding(
            "error", "unknown-task", source.file, function.lineno if function else None,
            f"The family {family.name} has no task {shown(task)}.", "No environment can be created for it.",
            f"The nearest of its tasks are {_listed(closest(task, tasks))}.",
        )  # fmt: skip


def variable_findings(source: FamilySource, variables: Mapping[str, str] | None) -> Iterator[Finding]:
    """Yields required variables that are missing or empty.

    Args:
        variables: those of the env file; None if it is not known which will be given.
    """
    required = required_variables(source)
    if variables is None or not required:
        return
    value = source.attribute(_VARIABLES)
    line = value.lineno if value else None
    if missing := [name for name in required if name not in variables]:
        yield Finding(
            "error", "missing-variable", source.file, line,
            f"The following required environment variables are not set: {', '.join(missing[:_SHOWN])}.",
            "No task of the family can start without them.",
            "Add them as NAME=value lines to the file that you give with --env-file.",
        )  # fmt: skip
    if empty := [name for name in required if variables.get(name) == ""]:
        yield Finding(
            "warning", "empty-variable", source.file, line,
            f"The env file leaves required environment variables empty: {', '.join(empty[:_SHOWN])}.",
            "They count as set, and the family gets an empty text.", "Write their values after the =.",
        )  # fmt: skip


def _listed(names: Collection[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(shown, list(names)[:_SHOWN])) + more


def _line_of_key(path: Path, key: str) -> int | None:
    """Returns the first line of a YAML file that begins like a key. The file has been read and is short."""
    beginning = re.compile(rf"\s*(['\"]?){re.escape(key)}\1\s*:")
    lines = path.read_text(errors="replace").splitlines()
    return next((number for number, line in enumerate(lines, start=1) if beginning.match(line)), None)
