"""Checks a whole family, for `provisioner check`, and refuses one that surely fails, before anything is created."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path

from provisioner.base.errors import FAMILIES_PAGE, MissingVariablesError, TaskFamilyError
from provisioner.base.validation import listed
from provisioner.family.build_steps import FILE_NAME, load_build_steps
from provisioner.family.findings import (
    RULES_PAGE,
    Finding,
    bounded,
    glob_findings,
    import_findings,
    method_findings,
    required_variables,
    secret_findings,
    task_findings,
    task_names,
    variable_findings,
)
from provisioner.family.loader import TaskFamily, load_family, locate_family
from provisioner.family.manifest import FILE_NAMES, load_manifest
from provisioner.family.setup_data import unknown_task
from provisioner.family.source import check_module, read_source

# The most findings of each kind of check: a longer list helps no reader.
MAXIMUM_OF_A_KIND = 200

_LINE = re.compile(r"\bline (\d{1,9})\b")


@dataclass(frozen=True)
class Checked:
    """The result of a check, with what a family's text tells before its image is built.

    Args:
        family: the family's name.
        findings: errors first.
        tasks: the names of the tasks, or None if only a machine can tell them.
        needs: the variables that an env file has to set, as far as the text tells.
        has_aux_vm: whether the tasks may have an aux VM; None if only a machine can tell.
    """

    family: str
    findings: tuple[Finding, ...] = ()
    tasks: tuple[str, ...] | None = None
    needs: tuple[str, ...] = ()
    has_aux_vm: bool | None = None


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
    source = read_source(family.module)
    kinds = [secret_findings(family, variables or {}), glob_findings(family)]
    if source is None:
        too_large = Finding(
            "warning", "not-checked", family.module.name, None, "The module is too large to be checked.",
            "Its parsed code would fill the controller's memory.", "Move data from the module into files.",
        )  # fmt: skip
        return Checked(family.name, tuple(bounded([too_large, *chain(*map(_capped, kinds))])))
    kinds += [
        method_findings(source),
        task_findings(source, family, task),
        variable_findings(source, variables),
        import_findings(source, family),
    ]
    return Checked(
        family.name,
        tuple(bounded(list(chain(*map(_capped, kinds))))),
        tasks=task_names(source),
        needs=tuple(required_variables(source)),
        has_aux_vm=False if source.lacks("get_aux_vm_spec") else None,
    )


def refuse_mistakes(family: TaskFamily, task: str | None, variables: Mapping[str, str] | None) -> Checked:
    """Refuses a family that surely fails. Takes a fraction of a second for most families, and creates nothing.

    Args:
        task: the task that is to be run; None for all.
        variables: those of the env file; None if they do not matter yet.

    Returns:
        what the text tells, and the warnings.

    Raises:
        UsageError: the family has no such task.
        MissingVariablesError: required variables are not set.
        TaskFamilyError: the family has other mistakes; the message lists them with file and line.
    """
    checked = check_loaded(family, task, variables)
    errors = [each for each in checked.findings if each.level == "error"]
    rules = {finding.rule for finding in errors}
    if rules == {"unknown-task"}:
        raise unknown_task(family.name, task or "", checked.tasks or ())
    if rules == {"missing-variable"}:
        missing = [name for name in checked.needs if name not in (variables or {})]
        raise MissingVariablesError(missing[:MAXIMUM_OF_A_KIND])
    if errors:
        lines = listed(f"{finding.place}: {finding.what} [{finding.rule}]" for finding in errors)
        hint = f"`provisioner check FAMILY` says why, and what to do. {RULES_PAGE} has every rule."
        raise TaskFamilyError(f"The family {family.name} cannot run:{lines}", hint=hint)
    return checked


def _capped(findings: Iterator[Finding]) -> Iterator[Finding]:
    return islice(findings, MAXIMUM_OF_A_KIND)


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
                error.hint or f"Correct it. {FAMILIES_PAGE}#files says what a family may hold.",
            )  # fmt: skip
