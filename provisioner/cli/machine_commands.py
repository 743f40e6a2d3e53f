"""The commands `exec`, `ssh`, `cp` and `agent`, which work in an environment's machines."""

from __future__ import annotations

import os
import shlex
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import typer

from provisioner import child_environment
from provisioner.cli.command import command
from provisioner.cli.options import EnvFileOption, EnvironmentArgument, parse_path, parse_text
from provisioner.cli.output import Result
from provisioner.cli.sessions import environment_session
from provisioner.environment.agent import Agent, run_agent
from provisioner.errors import AgentError, HostError, UsageError
from provisioner.family.env_file import refuse_env_file_of_agent
from provisioner.machines.admission import readmit
from provisioner.machines.connect import connect
from provisioner.models import Role
from provisioner.printable import PrintableStream
from provisioner.remote import transfer
from provisioner.remote.login import Login
from provisioner.remote.namespaces import proxy_command

MachineOption = Annotated[Literal["primary", "aux"], typer.Option("--machine", help="Which machine.")]
# None: agent on the primary machine, admin on the aux VM.
UserOption = Annotated[
    Literal["agent", "root", "admin"] | None,
    typer.Option("--user", help="User in the machine.", show_default="agent; aux: admin"),
]
SHOWN_PATHS = 10


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    command(app, "exec")(execute)
    command(app, "ssh")(ssh)
    command(app, "cp")(cp)
    command(app, "agent")(agent)


def _user(user: str | None, machine: Role) -> str:
    chosen = user or {"primary": "agent", "aux": "admin"}[machine]
    if chosen not in {"primary": ("agent", "root"), "aux": ("admin", "root")}[machine]:
        raise UsageError(f"The {machine} machine has no user {chosen}.")
    return chosen


def execute(
    env: EnvironmentArgument,
    arguments: Annotated[list[str], typer.Argument(metavar="CMD...", help="Command to run, after --.")],
    machine: MachineOption = "primary",
    user: UserOption = None,
    as_json: bool = False,
) -> Result:
    """Runs a command, passes its output on and ends with its exit code. Its stdin is empty.

    The output is unchanged, except on a terminal, which the machine must not control.
    """
    opened, environment = environment_session(env)
    chosen = _user(user, machine)
    out, err = (None, None) if as_json else (_Output(1), _Output(2))
    with connect(opened, environment, machine) as connection:
        done = connection.run(arguments, user=chosen, on_stdout=out, on_stderr=err, timeout_seconds=None)
    for output in filter(None, (out, err)):
        output.end()
    data = {
        "environment": environment.id,
        "exit_code": done.exit_code,
        "stdout": done.stdout.decode(errors="replace"),
        "stderr": done.stderr.decode(errors="replace"),
    }
    return Result(data, "", done.exit_code)


class _Output:
    """Writes a command's output to a descriptor of ours: made printable if that is a terminal, otherwise unchanged."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._printable = PrintableStream() if os.isatty(descriptor) else None

    def __call__(self, data: bytes) -> None:
        _write(self._descriptor, self._printable.feed(data).encode() if self._printable else data)

    def end(self) -> None:
        """Writes what was held back."""
        if self._printable:
            _write(self._descriptor, self._printable.flush().encode())


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def ssh(env: EnvironmentArgument, machine: MachineOption = "primary", user: UserOption = None) -> Result:
    """Replaces this process with OpenSSH's client, which handles terminals well."""
    opened, environment = environment_session(env)
    readmit(opened, environment)
    login = opened.environments.login(environment, machine, _user(user, machine))
    known_hosts = opened.environments.directory(environment.id) / "keys" / f"known_hosts_{machine}"
    try:
        command = _ssh_command(login, known_hosts)
        os.execvpe("ssh", command, child_environment.for_terminal(os.environ))  # noqa: S606 - no shell wanted
    except FileNotFoundError as error:
        raise HostError("ssh is not installed.", hint="sudo apt-get install openssh-client") from error


def _ssh_command(login: Login, known_hosts: Path, *more: str) -> list[str]:
    """Returns OpenSSH's arguments for a login, and writes the file with the only host key to accept."""
    alias = f"{known_hosts.parent.parent.name}-{known_hosts.name.removeprefix('known_hosts_')}"
    known_hosts.write_text(f"{alias} {login.host_key}\n")
    argv = ["ssh", "-F", "none", "-i", str(login.private_key), "-p", str(login.endpoint.port)]
    options = [
        f"HostKeyAlias={alias}",
        f'UserKnownHostsFile="{known_hosts}"',
        "StrictHostKeyChecking=yes",
        "IdentitiesOnly=yes",
        "LogLevel=ERROR",
    ]
    if login.via:
        through = _ssh_command(login.via, known_hosts.with_name(f"{known_hosts.name}-jump"), "-W", "HOST:PORT")
        # OpenSSH expands % in the command, adds an "exec" and passes it to a shell.
        command = shlex.join(through).replace("%", "%%").replace("HOST:PORT", "%h:%p")
        options.append(f"ProxyCommand={command}")
    elif login.pidfile:
        connecting = proxy_command(login.pidfile, login.endpoint.host, login.endpoint.port)
        options += [f"ProxyCommand={shlex.join(connecting).replace('%', '%%')}", "ProxyUseFdpass=yes"]
    for option in options:
        argv += ["-o", option]
    return [*argv, *more, f"{login.user}@{login.endpoint.host}"]


def cp(
    source: Annotated[str, typer.Argument(metavar="FROM", help="PATH or ENV:PATH.")],
    destination: Annotated[str, typer.Argument(metavar="TO", help="PATH or ENV:PATH.")],
    machine: MachineOption = "primary",
    user: UserOption = None,
) -> Result:
    """Copies into or out of a machine. `ENV:` alone as the destination means the user's home."""
    if not source or not destination:
        raise UsageError("FROM and TO must not be empty.")
    from_machine, to_machine = _is_remote(source), _is_remote(destination)
    if from_machine == to_machine:
        raise UsageError("Exactly one of the two paths must have the form ENV:PATH.")
    name, _, remote = (source if from_machine else destination).partition(":")
    if from_machine and PurePosixPath(remote).name in ("", ".."):
        raise UsageError("The path in the machine must end with the name of a file or directory.")
    opened, environment = environment_session(name)
    chosen = _user(user, machine)
    with connect(opened, environment, machine) as connection:
        if from_machine:
            downloaded = transfer.download(connection, remote, Path(destination), chosen)
        else:
            downloaded = transfer.Downloaded(transfer.upload(connection, Path(source), remote or ".", chosen), (), 0)
    data = {
        "environment": environment.id,
        "files": downloaded.files,
        "skipped": list(downloaded.skipped),
        "skipped_count": downloaded.skipped_count,
    }
    return Result(data, "\n".join([f"{downloaded.files} files copied", *_skipped(downloaded)]))


def _skipped(downloaded: transfer.Downloaded) -> list[str]:
    """Lists the paths that were not copied, on at most one screen."""
    count = downloaded.skipped_count
    if not count:
        return []
    more = [f"  and {count - SHOWN_PATHS} more"] if count > SHOWN_PATHS else []
    named = [f"  {path}" for path in downloaded.skipped[:SHOWN_PATHS]]
    return [f"{count} links, special files and names with control characters skipped:", *named, *more]


def _is_remote(path: str) -> bool:
    name, colon, _ = path.partition(":")
    return bool(colon) and "/" not in name


def agent(
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
    done = run_agent(opened, environment, Agent(directory, agent_command))
    if done.problem:
        raise AgentError(done.problem)
    data = {
        "environment": environment.id,
        "exit_code": done.exit_code,
        "stdout": opened.redactor.redact(done.stdout.decode(errors="replace")),
        "stderr": opened.redactor.redact(done.stderr.decode(errors="replace")),
    }
    code = -1 if done.exit_code is None else done.exit_code
    return Result(data, f"The agent ended with exit code {code}", code if code >= 0 else 255)
