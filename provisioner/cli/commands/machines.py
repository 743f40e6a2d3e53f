"""The commands `exec`, `ssh`, `cp` and `agent`, which work in an environment's machines."""

from __future__ import annotations

import os
import select
import shlex
import shutil
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import typer

from provisioner.base import child_environment
from provisioner.base.errors import AgentError, HostError, UsageError
from provisioner.base.models import Environment, Role
from provisioner.base.printable import PrintableStream
from provisioner.cli.command import command
from provisioner.cli.completion import path_beginnings
from provisioner.cli.options import EnvFileOption, EnvironmentArgument, parse_path, parse_text
from provisioner.cli.output import Result, streams
from provisioner.cli.recorded_program import run_recorded
from provisioner.cli.sessions import environment_session
from provisioner.cli.standard_input import StandardInput, terminal_size
from provisioner.copying import transfer
from provisioner.family.env_file import refuse_env_file_of_agent
from provisioner.machines.connect import connect_kept
from provisioner.ssh.openssh import ssh_command


def _roles(incomplete: str) -> list[str]:
    """Returns the machines' roles for the shell's completion."""
    return [role for role in ("primary", "aux") if role.startswith(incomplete)]


MachineOption = Annotated[
    str,
    typer.Option(
        "--machine", metavar="NAME", help="Which machine: primary, aux, or its host name.", autocompletion=_roles
    ),
]
# None: agent on the primary machine, admin on the aux VM, or ubuntu if it is an Ubuntu.
UserOption = Annotated[
    Literal["agent", "root", "admin", "ubuntu"] | None,
    typer.Option("--user", help="User in the machine.", show_default="agent; aux: admin, ubuntu if it is an Ubuntu"),
]
SHOWN_PATHS = 10
# A port that cannot be had here is an error, and a machine that is lost ends the client.
SSH_OPTIONS = ("-oExitOnForwardFailure=yes", "-oServerAliveInterval=15")


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    command(app, "exec")(execute)
    command(app, "ssh")(ssh)
    command(app, "cp")(cp)
    command(app, "agent")(agent)


def machine_role(environment: Environment, name: str) -> Role:
    """Returns the role of a machine that an option names.

    Raises:
        UsageError: there is none.
    """
    role = environment.role_of(name)
    if role is None:
        names = ", ".join(environment.hostname(role) for role in environment.roles)
        raise UsageError(f"{environment.id} has no machine {name}.", hint=f"It has: {names}.")
    return role


def _machine(environment: Environment, name: str, user: str | None) -> tuple[Role, str]:
    """Returns the role of a machine, and its user.

    Raises:
        UsageError: there is none, or it has no such user.
    """
    role = machine_role(environment, name)
    users = ("agent", "root")
    if role == "aux":
        from provisioner.machines.create import aux_user  # takes long to import, and only this needs it

        users = (aux_user(environment.machines[role].distribution), "root")
    chosen = user or users[0]
    if chosen not in users:
        raise UsageError(f"The {role} machine has no user {chosen}.")
    return role, chosen


def execute(
    env: EnvironmentArgument,
    arguments: Annotated[list[str], typer.Argument(metavar="CMD...", help="Command to run, after --.")],
    machine: MachineOption = "primary",
    user: UserOption = None,
    as_json: bool = False,
) -> Result:
    """Runs a command with this process's stdin, passes its output on and ends with its exit code.

    The output is unchanged, except on a terminal, which the machine must not control.
    """
    opened, environment = environment_session(env)
    role, chosen = _machine(environment, machine, user)
    out, err = (None, None) if as_json else (_Output(1), _Output(2))
    with connect_kept(opened, environment, role) as connection:
        done = connection.run(
            arguments, user=chosen, stdin=StandardInput(), on_stdout=out, on_stderr=err, timeout_seconds=None
        )
    for output in filter(None, (out, err)):
        output.end()
    data = {
        "environment": environment.id,
        "exit_code": done.exit_code,
        **streams(
            done.stdout.decode(errors="replace"),
            done.stderr.decode(errors="replace"),
            done.stdout_size,
            done.stderr_size,
        ),
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
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another program left it so; all programs that have it open share the flag
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()


def ssh(
    env: EnvironmentArgument,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="Options and a command for OpenSSH, after --.", show_default=False),
    ] = None,
    machine: MachineOption = "primary",
    user: UserOption = None,
) -> Result:
    """Runs OpenSSH's client, which handles terminals well. One without a terminal is not recorded."""
    from provisioner.machines.connect import readmit, require_alive  # take long to import, and only this needs them

    opened, environment = environment_session(env)
    role, chosen = _machine(environment, machine, user)
    login = opened.environments.login(environment, role, chosen)
    require_alive(opened, environment, role)
    readmit(opened, environment)
    known_hosts = opened.environments.directory(environment.id) / "keys" / f"known_hosts_{role}"
    # OpenSSH takes options after the host as well, and of settings that are given twice, the first.
    command = [*ssh_command(login, known_hosts, *SSH_OPTIONS), *(arguments or ())]
    if shutil.which("ssh") is None:
        raise HostError("ssh is not installed.", hint="sudo apt-get install openssh-client")
    if not (environment.recorded and os.isatty(0) and os.isatty(1)):
        os.execvpe("ssh", command, child_environment.for_terminal(os.environ))  # noqa: S606 - no shell wanted
    size, what = terminal_size(1), shlex.join(["ssh", f"{chosen}@{role}", *(arguments or ())])
    with opened.cast(environment, "ssh", what, size.columns, size.lines) as cast:
        variables = child_environment.for_terminal(os.environ)
        return Result({}, "", run_recorded(command, variables, cast, opened.shield))


def cp(
    source: Annotated[str, typer.Argument(metavar="FROM", help="PATH or ENV:PATH.", autocompletion=path_beginnings)],
    destination: Annotated[str, typer.Argument(metavar="TO", help="PATH or ENV:PATH.", autocompletion=path_beginnings)],
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
    role, chosen = _machine(environment, machine, user)
    with connect_kept(opened, environment, role) as connection:
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
    from provisioner.environment.agent import AgentCommand, run_agent  # takes long to import, and only this needs it

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
