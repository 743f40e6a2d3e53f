"""Checks the values that a family writes as literals: tasks, variables, permissions, aux VM, version.

A value that is computed is not known, and nothing is said of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from provisioner.errors import TaskFamilyError
from provisioner.family.build_steps import check_build_steps
from provisioner.family.checks.finding import Finding
from provisioner.family.checks.source import FamilySource, literal, strings
from provisioner.family.env_file import AUX_VM_VARIABLES, is_variable_name
from provisioner.family.loader import TaskFamily
from provisioner.family.manifest import FILE_NAMES
from provisioner.family.setup_data import closest, parse_setup_data
from provisioner.family.vm_spec import parse_vm_spec
from provisioner.models import VMSpec
from provisioner.validation import shown

_VERSIONS = re.compile(r"0\.[1-5](\.\d+)*")
_VARIABLES = "required_environment_variables"
_SHOWN = 20


def literal_tasks(source: FamilySource) -> dict[str, int] | None:
    """Returns the names of the tasks with their lines, or None if the text does not tell them all."""
    value = source.returned("get_tasks")
    if isinstance(value, ast.DictComp):
        value = source.iterated(value)
        names = strings(value)
        if names is not None:
            return {str(name.value): name.lineno for name in names}
    if not isinstance(value, ast.Dict):
        return None
    keys = [key for key in value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return {str(key.value): key.lineno for key in keys} if len(keys) == len(value.keys) else None


def mistyped_task(family: TaskFamily, task: str) -> str:
    """Returns the manifest's task that is meant, if another name is surely a mistake; empty otherwise.

    A manifest need not name all tasks. So a name counts only if it differs in case or in two swapped letters:
    `files` and `main_2` may be tasks beside `file` and `main_1`.
    """
    names = family.manifest.tasks
    return "" if task in names else next((name for name in names if _is_surely_meant(name, task)), "")


def _is_surely_meant(name: str, typed: str) -> bool:
    name, typed = name.casefold(), typed.casefold()
    different = [place for place, pair in enumerate(zip(name, typed, strict=False)) if pair[0] != pair[1]]
    if len(name) != len(typed) or not different:
        return name == typed
    first, last = different[0], different[-1]
    are_neighbours = len(different) == 2 and last == first + 1
    return (
        are_neighbours and name[first] + name[last] == typed[last] + typed[first] and name[first : last + 1].isalpha()
    )


def missing_variables(source: FamilySource, variables: Mapping[str, str]) -> list[str]:
    """Returns the variables that the family surely requires, and that neither an env file nor provisioner sets."""
    return [name for name in _from_env_file(source) if name not in variables]


def _from_env_file(source: FamilySource) -> list[str]:
    """Returns the variables that the family surely requires and that provisioner does not set."""
    ours: tuple[str, ...] = () if source.lacks("get_aux_vm_spec") else AUX_VM_VARIABLES
    names = [str(each.value) for each in strings(source.attribute(_VARIABLES)) or ()]
    return [name for name in dict.fromkeys(names) if name not in ours]


def literal_aux_vm(source: FamilySource) -> VMSpec | None:
    """Returns the aux VM that all tasks have, if its spec is written as a literal and valid.

    Raises:
        TaskFamilyError: it is not valid.
    """
    try:
        value = literal(source.returned("get_aux_vm_spec"))
    except ValueError:
        return None
    return None if value is None else parse_vm_spec(value, "get_aux_vm_spec")


def task_findings(source: FamilySource, family: TaskFamily, task: str | None) -> Iterator[Finding]:
    """Yields what is wrong with the tasks' names: in get_tasks, in the manifest, and of the one that is asked for."""
    tasks = literal_tasks(source)
    if tasks is None:
        if task is not None and (meant := mistyped_task(family, task)):
            yield Finding(
                "error", "unknown-task", _manifest_name(family), None,
                f"The manifest names no task {shown(task)}, but {shown(meant)}.",
                "No environment can be created for a task that the family does not have.",
                f"Correct the name. If get_tasks has both tasks, name {shown(task)} in the manifest, too.",
            )  # fmt: skip
        return
    function = source.function("get_tasks")
    line = function.lineno if function else None
    try:
        parse_setup_data({"tasks": {name: {} for name in tasks}})
    except TaskFamilyError as error:
        yield Finding(
            "error", "invalid-tasks", source.file, line, error.message, "Setup data like this is refused.",
            "Let get_tasks return a dict with a name and a value for each task.",
        )  # fmt: skip
        return
    yield from _duplicates(source, tasks)
    yield from _manifest(family, tasks)
    if task is not None and task not in tasks:
        near = closest(task, tasks)
        which = "Its tasks are" if len(near) == len(tasks) else "The nearest of its tasks are"
        yield Finding(
            "error", "unknown-task", source.file, line, f"The family {family.name} has no task {shown(task)}.",
            "No environment can be created for it.",
            f"{which} {', '.join(map(shown, near))}.",
        )  # fmt: skip


def _manifest(family: TaskFamily, tasks: Mapping[str, int]) -> Iterator[Finding]:
    manifest = _manifest_name(family)
    unknown = [name for name in family.manifest.tasks if name not in tasks]
    for name in unknown[:_SHOWN]:
        yield Finding(
            "warning", "unknown-manifest-task", manifest, _line_of_key(family.directory / manifest, name),
            f"The manifest names the task {shown(name)}, which get_tasks does not have.",
            "Its resources and scoring are for no task.",
            f"Remove it, or correct its name. get_tasks has {_listed(list(tasks))}.",
        )  # fmt: skip


def _manifest_name(family: TaskFamily) -> str:
    return next((name for name in FILE_NAMES if name in family.files), "")


def _duplicates(source: FamilySource, tasks: Mapping[str, int]) -> Iterator[Finding]:
    value = source.returned("get_tasks")
    keys = [key for key in value.keys if isinstance(key, ast.Constant)] if isinstance(value, ast.Dict) else []
    for key in keys:
        if tasks[str(key.value)] != key.lineno:
            yield Finding(
                "warning", "duplicate-task", source.file, key.lineno,
                f"get_tasks names the task {shown(key.value)} twice.", "Only the last one counts.",
                "Give each task a name of its own.",
            )  # fmt: skip


def _listed(names: list[str]) -> str:
    return ", ".join(map(shown, names[:_SHOWN])) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _line_of_key(path: Path, key: str) -> int | None:
    """Returns the first line of a YAML file that begins like a key. The file has been read and is short."""
    beginning = re.compile(rf"\s*(['\"]?){re.escape(key)}\1\s*:")
    lines = path.read_text(errors="replace").splitlines()
    return next((number for number, line in enumerate(lines, start=1) if beginning.match(line)), None)


def variable_findings(source: FamilySource, variables: Mapping[str, str] | None) -> Iterator[Finding]:
    """Yields what is wrong with the required variables.

    Args:
        variables: those of the env file; None if it is not known which will be given.
    """
    value = source.attribute(_VARIABLES)
    line = value.lineno if value else None
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield Finding(
            "error", "invalid-variable", source.file, line, f"{_VARIABLES} is a string, not a list of names.",
            "Setup data like this is refused.", f"Write {_VARIABLES} = [{shown(value.value)}].",
        )  # fmt: skip
    for name in strings(value) or ():
        if not is_variable_name(str(name.value)):
            yield Finding(
                "error", "invalid-variable", source.file, name.lineno,
                f"{shown(name.value)} is not the name of an environment variable.", "Setup data like this is refused.",
                "A name is a letter or _, followed by letters, digits and _.",
            )  # fmt: skip
    missing = [] if variables is None else missing_variables(source, variables)
    if missing:
        yield Finding(
            "error", "missing-variable", source.file, line,
            f"The following required environment variables are not set: {', '.join(missing[:_SHOWN])}.",
            "No task of the family can start without them.",
            "Add them as NAME=value lines to the file that you give with --env-file.",
        )  # fmt: skip
    if empty := [name for name in _from_env_file(source) if (variables or {}).get(name) == ""]:
        yield Finding(
            "warning", "empty-variable", source.file, line,
            f"The env file leaves required environment variables empty: {', '.join(empty[:_SHOWN])}.",
            "They count as set, and the family gets an empty text.", "Write their values after the =.",
        )  # fmt: skip


def value_findings(source: FamilySource, family: TaskFamily) -> Iterator[Finding]:
    """Yields what is wrong with the version, the permissions and the aux VM's spec."""
    yield from _version(source)
    permissions = source.returned("get_permissions")
    names = [str(each.value) for each in strings(permissions) or ()]
    if isinstance(permissions, ast.Constant) or names not in ([], ["full_internet"]):
        said = shown(permissions.value) if isinstance(permissions, ast.Constant) else f"[{_listed(names)}]"
        yield Finding(
            "error", "invalid-permissions", source.file, permissions.lineno if permissions else None,
            f"get_permissions returns {said}.",
            "A misspelt permission would silently be another one, so it is refused.",
            'Return [] for no internet, or ["full_internet"].',
        )  # fmt: skip
    try:
        spec = literal_aux_vm(source)
        check_build_steps(spec.build_steps if spec else (), family.directory, "get_aux_vm_spec.build_steps")
    except TaskFamilyError as error:
        function = source.function("get_aux_vm_spec")
        yield Finding(
            "error", "invalid-aux-vm", source.file, function.lineno if function else None, error.message,
            "The aux VM cannot be created.", "The types VMSpec and GPUSpec of metr_task_standard say what a spec has.",
        )  # fmt: skip


def _version(source: FamilySource) -> Iterator[Finding]:
    line = source.definition.lineno if source.definition else None
    if source.lacks("standard_version"):
        yield Finding(
            "warning", "standard-version", source.file, line, "The class has no standard_version.",
            "The Task Standard wants one. provisioner only records it.", 'Write standard_version = "0.5.0".',
        )  # fmt: skip
    value = source.attribute("standard_version")
    if isinstance(value, ast.Constant) and not (isinstance(value.value, str) and _VERSIONS.fullmatch(value.value)):
        yield Finding(
            "warning", "standard-version", source.file, value.lineno,
            f"standard_version is {shown(value.value)}.",
            "provisioner follows versions 0.1 to 0.5 of the Task Standard. It records the version, and goes by 0.5.",
            'Write standard_version = "0.5.0", if the family follows that.',
        )  # fmt: skip
