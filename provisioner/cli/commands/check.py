"""The commands `check` and `new`, which need neither a machine nor a cloud."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from provisioner.base.errors import UsageError
from provisioner.base.validation import shown
from provisioner.cli.command import command
from provisioner.cli.completion import task_names
from provisioner.cli.options import EnvFileOption, FamilyArgument, parse_path, parse_task_name
from provisioner.cli.output import Result, names_in_line
from provisioner.family.check import Checked, check_family
from provisioner.family.env_file import load_env_file
from provisioner.family.findings import Finding
from provisioner.family.loader import load_family, refuse_env_file_inside


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    command(app, "check")(check)
    command(app, "new")(new)


def check(
    family: FamilyArgument,
    task: Annotated[
        str | None,
        typer.Argument(
            metavar="[TASK]",
            help="Name of the task that is to run.",
            show_default=False,
            parser=parse_task_name,
            autocompletion=task_names,
        ),
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
    lines += _needs(checked) if env_file is None else []
    lines += _unknown(checked, task)
    lines.append(f"{checked.family}: {_counted(errors, 'error')}, {_counted(warnings, 'warning')}")
    return Result(data, "\n".join(lines), UsageError.exit_code if errors else 0)


def _text(finding: Finding, family: Path) -> str:
    """Returns a finding as compilers have it, so that an editor finds the place."""
    place = str(family / finding.place) if finding.place else str(family)
    return (
        f"{place}: {finding.level}: {finding.what} [{finding.rule}]\n"
        f"    why: {finding.why}\n    do:  {finding.fix}\n    see: {finding.see}\n"
    )


def _needs(checked: Checked) -> list[str]:
    if not checked.needs:
        return []
    return [f"Its tasks need --env-file with: {names_in_line(checked.needs)}."]


def _unknown(checked: Checked, task: str | None) -> list[str]:
    if task is None or checked.tasks is not None or any(found.level == "error" for found in checked.findings):
        return []
    return [f"The family's text does not tell whether there is a task {shown(task)}: building its image will."]


def _counted(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def new(
    family: Annotated[
        Path,
        typer.Argument(
            metavar="FAMILY",
            help="Directory to write; its last part is the family's name.",
            show_default=False,
            parser=parse_path,
        ),
    ],
    aux: Annotated[bool, typer.Option("--aux", help="Give the tasks an aux VM.")] = False,
    intermediate: Annotated[bool, typer.Option("--intermediate", help="Score in between as well.")] = False,
) -> Result:
    """Writes a family that works, to begin with."""
    from provisioner.family.new_family import write_family  # Jinja takes a while to import

    files = write_family(family, aux=aux, intermediate=intermediate)
    name = shlex.quote(str(family))
    text = "\n".join(
        [
            *(str(family / file) for file in files),
            "",
            f"  provisioner check {name}",
            f"  provisioner test {name} small                                 its own tests, in a machine",
            f"  echo 42 | provisioner run {name} small --submission -         score: 1",
        ]
    )
    return Result({"family": family.absolute().name, "directory": str(family.absolute()), "files": files}, text)
