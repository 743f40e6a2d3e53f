"""The commands `up`, `run`, `score`, `test`, and `destroy`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from provisioner.base.errors import ProvisionerError, TaskError, UsageError
from provisioner.base.models import Environment, ScoreLogEntry
from provisioner.base.printable import beginning, first_and_last_lines
from provisioner.base.progress import describe
from provisioner.cli.command import command
from provisioner.cli.commands.show import environment_data
from provisioner.cli.completion import environment_ids, task_names
from provisioner.cli.family_sessions import checked_session, destinations
from provisioner.cli.options import (
    AllowOption,
    EnvFileOption,
    EnvironmentArgument,
    FamilyArgument,
    KeepOption,
    Launch,
    NoRecordOption,
    NoTemplateOption,
    TaskArgument,
    parse_path,
    parse_task_name,
    parse_text,
)
from provisioner.cli.output import Result, streams
from provisioner.cli.sessions import damaged_session, environment_session, session, session_of
from provisioner.cli.submissions import SubmissionFileOption, SubmissionOption, read_submission
from provisioner.clouds.registry import Where
from provisioner.environment import lifecycle, selection, snapshots
from provisioner.environment.agent import AgentCommand, require_directory
from provisioner.environment.run import run as run_task
from provisioner.environment.run import run_tests as run_task_tests
from provisioner.family.env_file import refuse_env_file_of_agent
from provisioner.family.scores import ScoreResult
from provisioner.session import Session

# Of the message and of the details of an intermediate score; --json has all of them.
SHOWN_SCORE_CHARACTERS = 4000


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    command(app, "run")(run)
    command(app, "up")(up)
    command(app, "score")(score)
    command(app, "test")(run_tests)
    command(app, "destroy")(destroy)


def up(
    family: Annotated[
        Path | None,
        typer.Argument(metavar="FAMILY", help="Directory of the task family.", show_default=False, parser=parse_path),
    ] = None,
    task: Annotated[
        str | None,
        typer.Argument(
            metavar="TASK",
            help="Name of the task.",
            show_default=False,
            parser=parse_task_name,
            autocompletion=task_names,
        ),
    ] = None,
    snapshot: Annotated[
        str | None,
        typer.Option("--from", metavar="NAME", help="Bring up a copy of a frozen environment.", show_default=False),
    ] = None,
    env_file: EnvFileOption = None,
    allow: AllowOption = None,
    no_template: NoTemplateOption = False,
    no_record: NoRecordOption = False,
    keep: KeepOption = False,
    *,
    where: Where,
    launch: Launch,
) -> Result:
    """Brings an environment up."""
    if snapshot is not None:
        if family or task or env_file or allow or no_template or no_record or keep:
            raise UsageError(
                "--from takes no FAMILY, TASK, --env-file, --allow, --no-template, --no-record or --keep: "
                "a copy has all of these from its snapshot."
            )
        environment = snapshots.up(session(where=where, launch=launch), snapshot)
    elif family is None or task is None:
        raise UsageError("Give FAMILY and TASK, or --from NAME.")
    else:
        launch = replace(launch, templates=not no_template, record=not no_record)
        opened, loaded = checked_session(family, task, env_file, where, launch)
        environment = lifecycle.up(replace(opened, keep_failed=keep), loaded, task, destinations(allow))
    secrets = f" --env-file {shlex.quote(str(env_file))}" if env_file else ""
    next_steps = {
        f"provisioner ssh {environment.id}": "a shell as the agent",
        f"provisioner score {environment.id}{secrets}": "score its submission file",
        f"provisioner destroy {environment.id}": "remove it",
    }
    width = max(map(len, next_steps)) + 4
    text = "\n".join(
        [
            environment.id,
            "",
            *(f"  {step:{width}}{what}" for step, what in next_steps.items()),
            "",
            f"It ends on its own at {environment.expires_at:%H:%M:%S} UTC; `provisioner extend` gives it more time.",
        ]
    )
    return Result(environment_data(environment), text)


def run(
    family: FamilyArgument,
    task: TaskArgument,
    agent: Annotated[
        Path | None,
        typer.Option("--agent", metavar="DIR", help="Directory of the agent.", show_default=False, parser=parse_path),
    ] = None,
    agent_command: Annotated[
        str | None,
        typer.Option(
            "--command",
            metavar="CMD",
            help="Command that starts the agent.",
            show_default=False,
            parser=parse_text,
        ),
    ] = None,
    submission: SubmissionOption = None,
    submission_file: SubmissionFileOption = None,
    env_file: EnvFileOption = None,
    allow: AllowOption = None,
    no_template: NoTemplateOption = False,
    no_record: NoRecordOption = False,
    keep: KeepOption = False,
    *,
    where: Where,
    launch: Launch,
) -> Result:
    """Does a whole run and destroys the environment, unless it is to be kept."""
    if (agent is None) != (agent_command is None):
        raise UsageError("--agent and --command must be used together.")
    if (agent is None) == (submission is None and submission_file is None):
        raise UsageError("Use either --agent DIR --command CMD, --submission -, or --submission-file FILE.")
    if agent_command is not None and not agent_command.strip():
        raise UsageError("--command must not be empty.")
    if agent:
        require_directory(agent)
    answer = read_submission(submission, submission_file)
    launch = replace(launch, templates=not no_template, record=not no_record)
    opened, loaded = checked_session(family, task, env_file, where, launch)
    if agent and env_file:
        refuse_env_file_of_agent(agent, env_file)
    work = AgentCommand(agent, agent_command) if agent and agent_command else None
    allowed = destinations(allow)
    opened = replace(opened, keep_failed=keep)
    result = run_task(opened, loaded, task, agent=work, submission=answer, allowed=allowed, keep=keep)
    outcome = result.outcome
    opened.progress.note(
        f"`provisioner show {result.environment}` and `provisioner logs {result.environment}` say more"
    )
    data = {
        "environment": result.environment,
        "kept": keep,
        "family": result.family,
        "task": result.task,
        "status": outcome.kind,
        "score": outcome.score,
        "message": outcome.message,
        "agent_exit_code": result.agent_exit_code,
        "score_log": [entry.model_dump(mode="json") for entry in result.score_log],
        "phases": [phase.model_dump() for phase in result.phases],
        "recording": result.recording,
        "warnings": list(result.warnings),
    }
    return Result(data, outcome_text(outcome, result.warnings), _exit_code(outcome))


def outcome_text(outcome: ScoreResult, warnings: tuple[str, ...] = ()) -> str:
    """Describes how scoring ended, with what matters of a traceback, and what may spoil the result."""
    if outcome.score is not None:
        lines = [f"score: {outcome.score:g}"]
    else:
        lines = [f"no score: {outcome.kind}", outcome.message, first_and_last_lines(outcome.details, 4, 20)]
    return "\n".join(part for part in (*lines, *(f"warning: {warning}" for warning in warnings)) if part)


def _exit_code(outcome: ScoreResult) -> int:
    return TaskError.exit_code if outcome.failed else 0


def score(
    env: EnvironmentArgument,
    submission: SubmissionOption = None,
    submission_file: SubmissionFileOption = None,
    intermediate: Annotated[bool, typer.Option("--intermediate", help="Score once before the end.")] = False,
    env_file: EnvFileOption = None,
) -> Result:
    """Scores an environment."""
    answer = read_submission(submission, submission_file)
    if intermediate and answer is not None:
        raise UsageError("--intermediate scores the machine's current state and cannot be used with a submission.")
    opened, environment = environment_session(env, env_file)
    if intermediate:
        return _intermediate(opened, environment)
    environment, outcome = lifecycle.score(opened, environment, answer, readmit_agent=True)
    data = {
        "environment": environment.id,
        "status": outcome.kind,
        "score": outcome.score,
        "message": outcome.message,
        "score_log": [entry.model_dump(mode="json") for entry in environment.score_log],
        "warnings": list(environment.setup.warnings),
    }
    return Result(data, outcome_text(outcome, environment.setup.warnings), _exit_code(outcome))


def _intermediate(opened: Session, environment: Environment) -> Result:
    environment, result = lifecycle.intermediate_score(opened, environment)
    entry = result.entry.model_dump(mode="json") if result.entry else None
    data = {
        "environment": environment.id,
        "entry": entry,
        "visible_to_agent": result.visible,
        **streams(result.stdout, result.stderr, result.stdout_size, result.stderr_size),
    }
    return Result(data, _entry_text(result.entry))


def _entry_text(entry: ScoreLogEntry | None) -> str:
    """Describes an intermediate score, with the beginnings of its message and details if it has any."""
    lines = ["no score" if entry is None or entry.score is None else f"score: {entry.score:g}"]
    for name, said in (("message", entry.message), ("details", entry.details)) if entry else ():
        if said:
            lines.append(f"{name}: {beginning(json.dumps(said, ensure_ascii=False), SHOWN_SCORE_CHARACTERS)}")
    return "\n".join(lines)


def run_tests(
    family: FamilyArgument,
    task: TaskArgument,
    pytest_arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments for pytest, after --.", show_default=False)
    ] = None,
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


def destroy(
    environments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ENV...", help="Ids of environments.", show_default=False, autocompletion=environment_ids
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Destroy all environments and image builders.")] = False,
    env_file: EnvFileOption = None,
) -> Result:
    """Destroys environments, one after the other. A failure of any kind does not stop the others."""
    opened = session(env_file)
    if everything == bool(environments):
        raise UsageError("Give either the ids of environments or --all.")
    selected = selection.select_for_destroy(opened, environments or [], everything=everything)
    failures: dict[str, ProvisionerError] = {}

    def attempt(name: str, work: Callable[[], object]) -> None:
        try:
            work()
        except ProvisionerError as error:
            failures[name] = error
        except Exception as error:
            failures[name] = ProvisionerError(f"Unexpected {describe(error)}")

    for environment in selected.live:
        attempt(environment.id, partial(_destroy, opened, environment))
    for name in selected.damaged:
        attempt(name, partial(_destroy_damaged, opened, name))
    names = [*(environment.id for environment in selected.live), *selected.damaged]
    done = [name for name in names if name not in failures]
    lines = [f"{name}: destroyed" for name in done] + [f"{name}: already gone" for name in selected.gone]
    lines += [f"{name}: NOT destroyed: {error.message} {error.hint or ''}".rstrip() for name, error in failures.items()]
    data = {
        "destroyed": done,
        "already_gone": selected.gone,
        "failed": [{"environment": name, "message": error.message} for name, error in failures.items()],
    }
    exit_code = next((error.exit_code for error in failures.values()), 0)
    return Result(data, "\n".join(lines) or "Nothing to destroy.", exit_code)


def _destroy(opened: Session, environment: Environment) -> None:
    lifecycle.destroy(session_of(environment, opened), environment)


def _destroy_damaged(opened: Session, name: str) -> None:
    opened.progress.note(f"The record of {name} cannot be read: destroying it without its teardown")
    selection.destroy_damaged(damaged_session(name, opened), name)
