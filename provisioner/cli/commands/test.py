"""The command `test`: runs the tests of a family."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from provisioner.cli.family_sessions import checked_session, destinations
from provisioner.cli.options import (
    AllowOption,
    EnvFileOption,
    FamilyArgument,
    KeepOption,
    Launch,
    NoRecordOption,
    NoTemplateOption,
    TaskArgument,
)
from provisioner.cli.output import Result
from provisioner.clouds.registry import Where
from provisioner.environment.run import run_tests as run_task_tests


def main(
    family: FamilyArgument,
    task: TaskArgument,
    pytest_arguments: Annotated[list[str] | None, typer.Argument(help="Arguments for pytest, after --.")] = None,
    keep: KeepOption = False,
    env_file: EnvFileOption = None,
    allow: AllowOption = None,
    no_template: NoTemplateOption = False,
    no_record: NoRecordOption = False,
    *,
    where: Where,
    launch: Launch,
) -> Result:
    """Runs the family's tests; the exit code is pytest's."""
    launch = replace(launch, templates=not no_template, record=not no_record)
    opened, loaded = checked_session(family, task, env_file, where, launch)
    arguments = pytest_arguments or []
    opened = replace(opened, keep_failed=keep)
    environment, code = run_task_tests(opened, loaded, task, arguments, destinations(allow), keep=keep)
    data = {"environment": environment.id, "kept": keep, "pytest_exit_code": code}
    return Result(data, f"pytest ended with exit code {code}" + (f"; kept {environment.id}" if keep else ""), code)
