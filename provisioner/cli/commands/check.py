"""The command `check`, which needs neither a machine nor a cloud."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from provisioner.base.errors import UsageError
from provisioner.base.validation import shown
from provisioner.cli.options import EnvFileOption, FamilyArgument, parse_task_name
from provisioner.cli.output import Result, names_in_line
from provisioner.family.check import check_family
from provisioner.family.env_file import load_env_file
from provisioner.family.findings import Finding
from provisioner.family.loader import load_family, refuse_env_file_inside


def main(
    family: FamilyArgument,
    task: Annotated[
        str | None,
        typer.Argument(metavar="[TASK]", help="Name of the task that is to run.", parser=parse_task_name),
    ] = None,
    env_file: EnvFileOption = None,
) -> Result:
    """Checks a family's files. Runs nothing of the family's, and creates nothing."""
    checked = check_family(family, task, load_env_file(env_file) if env_file else None)
    if env_file and not any(finding.rule == "invalid-file" for finding in checked.findings):
        refuse_env_file_inside(load_family(family), env_file)
    errors = sum(finding.level == "error" for finding in checked.findings)
    warnings = len(checked.findings) - errors
    data = {
        "family": checked.family,
        "errors": errors,
        "warnings": warnings,
        "tasks": checked.tasks,
        "required_variables": checked.needs,
        "findings": [asdict(finding) | {"see": finding.see} for finding in checked.findings],
    }
    lines = [_text(finding, family) for finding in checked.findings]
    if checked.needs and env_file is None:
        lines.append(f"Its tasks need --env-file with: {names_in_line(checked.needs)}.")
    if task is not None and checked.tasks is None and not errors:
        lines.append(f"The family's text does not tell whether there is a task {shown(task)}: building its image will.")
    lines.append(f"{checked.family}: {_counted(errors, 'error')}, {_counted(warnings, 'warning')}")
    return Result(data, "\n".join(lines), UsageError.exit_code if errors else 0)


def _text(finding: Finding, family: Path) -> str:
    """Returns a finding as compilers have it, so that an editor finds the place."""
    place = str(family / finding.place) if finding.place else str(family)
    return (
        f"{place}: {finding.level}: {finding.what} [{finding.rule}]\n"
        f"    why: {finding.why}\n    do:  {finding.fix}\n    see: {finding.see}\n"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"
