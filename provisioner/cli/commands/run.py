"""The command `run`: a whole run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from provisioner.base.errors import UsageError
from provisioner.cli.commands.score import exit_code, outcome_text
from provisioner.cli.family_sessions import checked_session, destinations
from provisioner.cli.options import (
    AllowOption,
    EnvFileOption,
    FamilyArgument,
    KeepOption,
    Launch,
    NoRecordOption,
    NoTemplateOption,
    SubmissionFileOption,
    SubmissionOption,
    TaskArgument,
    parse_path,
    parse_text,
    read_submission,
)
from provisioner.cli.output import Result
from provisioner.clouds.registry import Where
from provisioner.environment.agent import AgentCommand, require_directory
from provisioner.environment.run import run as run_task
from provisioner.family.env_file import refuse_env_file_of_agent


def main(
    family: FamilyArgument,
    task: TaskArgument,
    agent: Annotated[
        Path | None, typer.Option("--agent", metavar="DIR", help="Directory of the agent.", parser=parse_path)
    ] = None,
    agent_command: Annotated[
        str | None, typer.Option("--command", metavar="CMD", help="Command that starts the agent.", parser=parse_text)
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
    return Result(data, outcome_text(outcome, result.warnings), exit_code(outcome))
