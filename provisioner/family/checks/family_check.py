"""Checks a whole family, for `provisioner check`, and refuses one that surely fails, before anything is created."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from provisioner.errors import MissingVariablesError, TaskFamilyError, UsageError
from provisioner.family.build_steps import FILE_NAME, load_build_steps
from provisioner.family.checks.finding import RULES_PAGE, Finding, bounded
from provisioner.family.checks.imports import import_findings
from provisioner.family.checks.inputs import input_findings
from provisioner.family.checks.literals import (
    literal_aux_vm,
    literal_tasks,
    missing_variables,
    task_findings,
    value_findings,
    variable_findings,
)
from provisioner.family.checks.methods import method_findings
from provisioner.family.checks.secrets import secret_findings
from provisioner.family.checks.source import FamilySource, read_source
from provisioner.family.explained import FILES
from provisioner.family.loader import TaskFamily, load_family, locate_family
from provisioner.family.manifest import FILE_NAMES, load_manifest
from provisioner.family.module import check_module
from provisioner.family.setup_data import unknown_task
from provisioner.models import VMSpec
from provisioner.validation import listed

# At most so many findings of each kind of check: a longer list helps no reader.
MAXIMUM_OF_A_KIND = 200

_LINE = re.compile(r"\bline (\d{1,9})\b")


@dataclass(frozen=True)
class Written:
    """What a family's text tells before its image is built.

    Args:
        tasks: the names of the tasks, or None if only a machine can tell them.
        needs: the variables that an env file has to set, as far as the text tells.
        aux_vm: the spec of the aux VM that all tasks have; None if they have none, or if only a machine can tell.
        has_aux_vm: whether they have one; None if only a machine can tell.
    """

    tasks: tuple[str, ...] | None = None
    needs: tuple[str, ...] = ()
    aux_vm: VMSpec | None = None
    has_aux_vm: bool | None = None


@dataclass(frozen=True)
class Checked:
    """The result of a check.

    Args:
        family: the family's name.
        findings: errors first.
        written: what the text tells.
    """

    family: str
    findings: tuple[Finding, ...]
    written: Written = Written()


def check_family(path: Path, task: str | None = None, variables: Mapping[str, str] | None = None) -> Checked:
    """Checks all of a family that can be known without running it.

    Args:
        path: the family's directory.
        task: the task that is to be run, if one is.
        variables: those of the env file; None if none is given.

    Raises:
        TaskFamilyError: the path is not a directory, or the directory has a file that cannot be copied into machines.
    """
    try:
        family = load_family(path)
    except TaskFamilyError:
        directory, name, _ = locate_family(path)
        return Checked(name, tuple(bounded(list(_invalid_files(directory, name)))))
    return check_loaded(family, task, variables)


def check_loaded(family: TaskFamily, task: str | None, variables: Mapping[str, str] | None) -> Checked:
    """Checks as `check_family` does, where the family's files can be loaded.

    Args:
        task: the task that is to be run; None for all.
        variables: those of the env file; None if none is given.

    Raises:
        TaskFamilyError: the module is not Python any more.
    """
    source = read_source(family)
    found = _of_source(source, family, task, variables) + _capped(secret_findings(family, variables or {}))
    found += _capped(import_findings(source, family)) if source else []
    return Checked(family.name, tuple(bounded(found)), _written(source))


def refuse_mistakes(family: TaskFamily, task: str | None, variables: Mapping[str, str] | None) -> Written:
    """Refuses a family that surely fails. Takes a fraction of a second, and creates nothing.

    Args:
        task: the task that is to be run; None for all.
        variables: those of the env file; None if they do not matter yet.

    Returns:
        what the text tells.

    Raises:
        UsageError: the family has no such task.
        MissingVariablesError: required variables are not set.
        TaskFamilyError: the family has other mistakes; the message lists them with file and line.
    """
    source = read_source(family)
    errors = [each for each in bounded(_of_source(source, family, task, variables)) if each.level == "error"]
    rules = {finding.rule for finding in errors}
    written = _written(source)
    if task is not None and rules == {"unknown-task"}:
        if written.tasks is None:
            raise UsageError(errors[0].what, hint=errors[0].fix)
        raise unknown_task(family.name, task, written.tasks)
    if source and variables is not None and rules == {"missing-variable"}:
        raise MissingVariablesError(missing_variables(source, variables)[:MAXIMUM_OF_A_KIND])
    if errors:
        lines = listed(f"{finding.place}: {finding.what} [{finding.rule}]" for finding in errors)
        hint = f"`provisioner check FAMILY` says why, and what to do. {RULES_PAGE} has every rule."
        raise TaskFamilyError(f"The family {family.name} cannot run:{lines}", hint=hint)
    return written


def _written(source: FamilySource | None) -> Written:
    if source is None:
        return Written()
    tasks = literal_tasks(source)
    try:
        spec = literal_aux_vm(source)
    except TaskFamilyError:  # the findings name it
        spec = None
    has_aux_vm = None
    if spec or source.lacks("get_aux_vm_spec"):
        has_aux_vm = spec is not None
    return Written(None if tasks is None else tuple(tasks), tuple(missing_variables(source, {})), spec, has_aux_vm)


def _of_source(
    source: FamilySource | None, family: TaskFamily, task: str | None, variables: Mapping[str, str] | None
) -> list[Finding]:
    if source is None:
        return [
            Finding(
                "warning", "not-checked", family.module.name, None, "The module is too large to be checked.",
                "Its parsed code would fill the controller's memory.", "Move data from the module into files.",
            )
        ]  # fmt: skip
    kinds = (
        method_findings(source),
        task_findings(source, family, task),
        variable_findings(source, variables),
        value_findings(source, family),
        input_findings(source, family),
    )
    return [finding for kind in kinds for finding in _capped(kind)]


def _capped(findings: Iterable[Finding]) -> list[Finding]:
    return list(islice(findings, MAXIMUM_OF_A_KIND))


def _invalid_files(directory: Path, name: str) -> Iterator[Finding]:
    """Yields an error for each of the module, the manifest and the build steps that cannot be read."""
    manifest = next((each for each in FILE_NAMES if (directory / each).exists()), FILE_NAMES[0])
    readers: dict[str, Callable[[], object]] = {
        f"{name}.py": partial(check_module, directory / f"{name}.py"),
        manifest: partial(load_manifest, directory),
        FILE_NAME: partial(load_build_steps, directory),
    }
    for file, read in readers.items():
        try:
            read()
        except TaskFamilyError as error:
            match = _LINE.search(error.message)
            line = int(match[1]) if match else None
            what = error.message.replace(":\n  - ", ": ", 1).replace("\n  - ", "; ").replace("\n", " ")
            yield Finding(
                "error", "invalid-file", file, line, what, "provisioner cannot read the family.",
                error.hint or f"Correct it. {FILES} says what a family may hold.",
            )  # fmt: skip
