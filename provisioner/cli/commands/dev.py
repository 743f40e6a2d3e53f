"""The command `dev`: keeps a family's environment up to date while the family is written."""

from __future__ import annotations

import secrets
from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from provisioner.base.errors import ProvisionerError, UsageError
from provisioner.base.models import Environment
from provisioner.base.printable import printable_lines
from provisioner.cli.command import progress
from provisioner.cli.commands.score import outcome_text
from provisioner.cli.family_sessions import checked_session, destinations, family_session
from provisioner.cli.options import (
    AllowOption,
    EnvFileOption,
    FamilyArgument,
    Launch,
    NoTemplateOption,
    SubmissionFileOption,
    SubmissionOption,
    TaskArgument,
    read_submission,
)
from provisioner.cli.output import Result, show
from provisioner.cli.sessions import session_of
from provisioner.cli.terminal import render_error
from provisioner.clouds.registry import Where
from provisioner.environment import lifecycle, operations
from provisioner.environment.development import Development
from provisioner.family.check import refuse_mistakes
from provisioner.family.loader import TaskFamily
from provisioner.session import Phases, Session


def main(
    family: FamilyArgument,
    task: TaskArgument,
    submission: SubmissionOption = None,
    submission_file: SubmissionFileOption = None,
    tests: Annotated[bool, typer.Option("--test", help="Run the family's tests in each environment.")] = False,
    env_file: EnvFileOption = None,
    allow: AllowOption = None,
    no_template: NoTemplateOption = False,
    as_json: bool = False,
    *,
    where: Where,
    launch: Launch,
) -> Result:
    """Keeps an environment of a task that is as the family's files are now, until Ctrl-C."""
    if as_json:
        raise UsageError("dev is for people and cannot be used with --json.", hint="`run`, `test` and `score` have it.")
    launch = replace(launch, templates=not no_template)
    answer = read_submission(submission, submission_file)
    opened, first = checked_session(family, task, env_file, where, launch)
    opened = replace(opened, keep_failed=True, label=f"dev {secrets.token_hex(3)}")
    allowed = destinations(allow)

    current = opened

    def load() -> tuple[Session, TaskFamily]:
        nonlocal current
        now, loaded = family_session(family, env_file, where, launch)
        refuse_mistakes(loaded, task, now.variables)
        if now.variables != current.variables:  # a session has a connection to the ledger
            current = replace(current, variables=now.variables)
        return current, loaded

    Development(
        session=opened,
        session_of=session_of,
        directory=first.directory,
        env_file=env_file,
        load=load,
        up=lambda now, loaded: lifecycle.bring_up(now, loaded, task, allowed),
        work=partial(_work, answer, tests=tests),
        tell=_tell,
    ).run()


def _work(submission: str | None, opened: Session, environment: Environment, *, tests: bool) -> None:
    """Scores or tests an environment as far as that is wanted, and prints what came of it."""
    phases = Phases(opened.progress)
    if submission is not None:
        with phases.phase("score"):
            environment, outcome = lifecycle.score(opened, environment, submission, readmit_agent=True)
        _print(outcome_text(outcome, environment.setup.warnings))
    if tests:
        with phases.phase("tests"), lifecycle.open_driver(opened, environment) as driver:
            code = operations.run_tests(opened, environment, driver, ())
        _print(f"pytest ended with exit code {code}")
    opened.progress.note(f"`provisioner ssh {environment.id}` logs in. Waiting for a change of the family's files")


def _print(text: str) -> None:
    progress().stop()
    show(printable_lines(text) + "\n")


def _tell(error: ProvisionerError) -> None:
    progress().stop()
    render_error(error, as_json=False)
