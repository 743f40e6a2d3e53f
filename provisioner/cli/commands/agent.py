"""The command `agent`: runs an agent in a primary machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from provisioner.base.errors import AgentError, UsageError
from provisioner.cli.options import EnvFileOption, EnvironmentArgument, parse_path, parse_text
from provisioner.cli.output import Result, streams
from provisioner.cli.sessions import environment_session
from provisioner.environment.agent import AgentCommand, run_agent
from provisioner.family.env_file import refuse_env_file_of_agent


def main(
    env: EnvironmentArgument,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The agent's directory.", parser=parse_path)],
    agent_command: Annotated[
        str,
        typer.Argument(metavar="COMMAND", help="Command that starts the agent, run by bash -lc.", parser=parse_text),
    ],
    env_file: EnvFileOption = None,
) -> Result:
    """Runs an agent and ends with its exit code."""
    if not agent_command.strip():
        raise UsageError("COMMAND must not be empty.")
    if env_file:
        refuse_env_file_of_agent(directory, env_file)
    opened, environment = environment_session(env, env_file)
    done = run_agent(opened, environment, AgentCommand(directory, agent_command))
    if done.problem:
        raise AgentError(done.problem)
    data = {
        "environment": environment.id,
        "exit_code": done.exit_code,
        **streams(
            opened.redactor.redact(done.stdout.decode(errors="replace")),
            opened.redactor.redact(done.stderr.decode(errors="replace")),
            done.stdout_size,
            done.stderr_size,
        ),
    }
    code = -1 if done.exit_code is None else done.exit_code
    return Result(data, f"The agent ended with exit code {code}", code if code >= 0 else 255)
