"""The services of a compose file as Inspect's sandboxes: containers of the Docker Engine in a sample's machine.

All goes through the machine's exec server, and from there through `docker exec` by the rules of Inspect's docker
sandbox.
Whatever the machine answers is checked: a container may have become the machine's root.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal, overload

from inspect_ai.util import (
    ExecResult,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
)

from provisioner import strict_json
from provisioner.errors import TaskError
from provisioner.inspect.blocking import launch
from provisioner.inspect.compose_project import DIRECTORY, Project
from provisioner.inspect.results import file_errors
from provisioner.inspect.sample import SampleMachines
from provisioner.inspect.sandbox import ProvisionerSandbox, path_in
from provisioner.printable import last_lines
from provisioner.ssh.calls import SMALL_CALL_SECONDS
from provisioner.ssh.connection import Connection
from provisioner.ssh.exchange import CANNOT_EXECUTE, NOT_FOUND, Completed, transfer_seconds
from provisioner.validation import shown

# Health checks bound it by themselves: a service that stays unhealthy ends the wait.
START_SECONDS = 1800
# `timeout` in the container ends a command first; the exec server ends what it did not.
GRACE_SECONDS = 15
_COMPOSE = ("docker", "compose", "--ansi", "never", "--progress", "plain", "--file", f"{DIRECTORY}/compose.json")
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_IDENTITY = re.compile(r"[0-9a-f]{12,64}")
_USER = re.compile(r"[^\0\n]{0,256}")
_DIRECTORY = re.compile(r"(?:/[^\0\n]{0,4095})?")
_ENGINE = "Error response from daemon: "
_RUNTIME = "OCI runtime exec failed: "

# Nothing of the image's own PATH or language. Root, whom the kernel allows everything, is refused what docker's sandbox
# refuses it.
_SCRIPT = f"""PATH={_PATH} LC_ALL=C; export PATH LC_ALL
fail() {{ echo "$1" >&2; exit 1; }}
if [ -d "$1" ]; then fail "Is a directory"; fi
if [ -e "$1" ]; then case $(stat -L -c %A -- "$1") in $2) ;; *) fail "Permission denied" ;; esac; fi
"""
_READ = """if [ -f "$1" ] && [ "$(stat -L -c %s -- "$1")" -gt "$3" ]; then fail "File too large"; fi
exec cat -- "$1"
"""
_WRITE = """mkdir -p -- "$3" && exec tee -- "$1" > /dev/null
"""
_READABLE, _WRITABLE, _ANY = "?r*", "??w*", "*"
_ERRORS = (
    (b"file too large", errno.EFBIG),
    (b"permission denied", errno.EACCES),
    (b"is a directory", errno.EISDIR),
    (b"no such file or directory", errno.ENOENT),
    (b"not a directory", errno.ENOTDIR),
    (b"read-only file system", errno.EROFS),
    (b"no space left", errno.ENOSPC),
)


@dataclass(frozen=True)
class Container:
    """A service's container in the machine.

    Args:
        service: the service's name.
        identity: the engine's id of it.
        user: runs commands in it, unless a call names another user; from the image or the file; empty for root.
        directory: the directory of relative paths.
    """

    service: str
    identity: str
    user: str
    directory: str

    @property
    def is_roots(self) -> bool:
        """Whether commands run as root, unless a call says otherwise."""
        return self.user.partition(":")[0] in ("", "0", "root")


class ServicesError(TaskError):
    """A sample's services did not start. Its machine is not lost for that."""


def start(project: Project, connection: Connection) -> list[Container]:
    """Starts a project's containers, waits until they run and are healthy, and returns those that run.

    Raises:
        ServicesError: as for running.
    """
    connection.write_file(f"{DIRECTORY}/compose.json", project.run.encode(), mode=0o600)
    up = (*_COMPOSE, "up", "--detach", "--no-build", "--pull", "never", "--wait", "--wait-timeout", str(START_SECONDS))
    done = connection.run(up, timeout_seconds=START_SECONDS + SMALL_CALL_SECONDS)
    return running(project, connection, _end(done))


def running(project: Project, connection: Connection, said: str = "") -> list[Container]:
    """Returns the containers of a project that run. In a copy, they were started in the machine that it is a copy of.

    Args:
        said: what Compose said when it started them.

    Raises:
        ServicesError: a service has no container, ended with an error, or is not healthy, or the default one has ended.
    """
    states = _states(connection)
    # `up --wait` fails if a service has ended, even with 0: what runs is asked, as docker's sandbox does.
    wrong = [name for name in project.services if not _is_well(states.get(name))]
    up = [name for name in project.services if states.get(name, {}).get("State") == "running"]
    if wrong or not up:
        what = f"The service {wrong[0]} is not up: {_words(states.get(wrong[0]))}" if wrong else "No service runs"
        raise ServicesError(f"{what}.", details=said + _logs(connection, wrong))
    if (default := project.services[0]) not in up:
        raise ServicesError(
            f"The default service {default} has ended already: {_words(states[default])}. Give it a `command` that "
            "stays, as `tail -f /dev/null`, or mark another service with `x-default: true`."
        )
    return _containers(connection, {name: states[name]["ID"] for name in up})


def _states(connection: Connection) -> dict[str, dict[str, Any]]:
    done = connection.run([*_COMPOSE, "ps", "--all", "--no-trunc", "--format", "json"])
    if done.exit_code:
        raise ServicesError("Compose in the machine does not say which services run.", details=_end(done))
    states = {}
    for line in done.stdout.splitlines():
        value = _parsed(line)
        if not isinstance(value, dict) or not _IDENTITY.fullmatch(str(value.get("ID"))):
            raise ServicesError(f"Compose in the machine says what is no service's state: {shown(str(value))}")
        states[str(value.get("Service"))] = value
    return states


def _is_well(state: Mapping[str, Any] | None) -> bool:
    if state is None:
        return False
    if state.get("State") == "running":
        return state.get("Health") in ("", "healthy", None)
    return state.get("State") == "exited" and state.get("ExitCode") == 0


def _words(state: Mapping[str, Any] | None) -> str:
    if state is None:
        return "it has no container"
    health = f", {state.get('Health')}" if state.get("Health") else ""
    return shown(f"{state.get('State')}{health}, exit code {state.get('ExitCode')}")[1:-1]


def _logs(connection: Connection, services: Sequence[str]) -> str:
    if not services:
        return ""
    done = connection.run([*_COMPOSE, "logs", "--no-color", "--tail", "40", services[0]])
    return f"\n{_end(done)}"


def _end(done: Completed) -> str:
    return last_lines((done.stdout + done.stderr).decode(errors="replace"), 4000)


def _containers(connection: Connection, identities: Mapping[str, str]) -> list[Container]:
    form = '{"user": {{json .Config.User}}, "directory": {{json .Config.WorkingDir}}}'
    done = connection.run(["docker", "inspect", "--format", form, *identities.values()])
    lines = done.stdout.splitlines()
    if done.exit_code or len(lines) != len(identities):
        raise ServicesError("The engine in the machine does not describe its containers.", details=_end(done))
    containers = []
    for (service, identity), line in zip(identities.items(), lines, strict=True):
        value = _parsed(line)
        config = value if isinstance(value, dict) else {}
        user, directory = config.get("user"), config.get("directory")
        # Each command in the container names them.
        if not _matches(_USER, user) or not _matches(_DIRECTORY, directory):
            raise ServicesError(
                f"The engine in the machine does not describe the container of {service}: {shown(str(value))}"
            )
        containers.append(Container(service, identity, str(user), str(directory) or "/"))
    return containers


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and bool(pattern.fullmatch(value))


def _parsed(line: bytes) -> Any:
    try:
        return strict_json.parse(line)
    except ValueError as error:
        raise ServicesError(f"The engine in the machine answers what is no JSON: {error}.") from error


def _with_variables(
    options: list[str], variables: Mapping[str, str], what: list[str]
) -> tuple[list[str], dict[str, str]]:
    """Returns a `docker exec` and its own environment, from which a shell takes the values of variables.

    So values are not recorded, as commands are; and under names of ours they mean nothing to the engine's client.
    """
    if not variables:
        return ["docker", "exec", *options, *what], {}
    values = {f"PROVISIONER_VALUE_{number}": value for number, value in enumerate(variables.values())}
    given = [f'--env {shlex.quote(f"{name}=")}"${value}"' for name, value in zip(variables, values, strict=True)]
    return ["/bin/sh", "-c", f'exec docker exec {" ".join(given)} "$@"', "sh", *options, *what], values


class ServiceSandbox(ProvisionerSandbox):
    """One service of a sample, a container in its machine.

    Args:
        machines: the sample's machine.
        container: which of its containers.
    """

    def __init__(self, machines: SampleMachines, container: Container) -> None:
        super().__init__(machines, "primary", "root", "/", {})
        self.container = container

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Runs a command in the container, without a terminal. Nothing is ever run twice.

        Raises:
            TimeoutError: it did not end in time; `timeout` in the container has ended it.
            PermissionError: its program may not be executed.
            SandboxUnavailableError: the machine does not answer, or the container does not run.
            ValueError: there is a null character in the command or its variables.
        """
        options = ["--workdir", str(PurePosixPath(self.container.directory) / (cwd or ""))]
        options += ["--interactive"] if input is not None else []
        options += ["--user", user] if user else []
        # By its own path: it runs as the call's user, before anything that the caller has named.
        limited = [] if timeout is None else ["/usr/bin/timeout", "-k", "5s", f"{timeout}s"]
        command, values = _with_variables(options, env or {}, [self.container.identity, *limited, *cmd])
        begin = time.monotonic()
        seconds = None if timeout is None else timeout + GRACE_SECONDS
        done = await super().exec(command, input, env=values, timeout=seconds)
        if timeout is not None and _timed_out(done.returncode, time.monotonic() - begin, timeout):
            error = TimeoutError(f"Command timed out after {timeout:g} seconds")
            error.truncated_output = done.stdout + done.stderr  # type: ignore[attr-defined]
            raise error
        silent = not done.stdout and not done.stderr
        # Of the engine's words, or of a command that died in silence, the engine is asked.
        if not done.success and (done.stderr.startswith(_ENGINE) or (silent and done.returncode > 128)):
            await self._on_machine(self._require_running)
        return _as_a_machine_would(done, cmd[0] if cmd else "")

    def _require_running(self, connection: Connection) -> None:
        """Asks the engine whether the container runs.

        Raises:
            SandboxUnavailableError: it does not.
        """
        form = "{{.State.Status}}, exit code {{.State.ExitCode}}"
        done = connection.run(["docker", "inspect", "--format", form, self.container.identity])
        state = done.stdout.decode(errors="replace").strip()
        if done.exit_code or not state.startswith("running"):
            raise SandboxUnavailableError(
                f"The container of the service {self.container.service} does not run: {shown(state or _end(done))}"
            )

    def _path(self, path: str) -> str:
        return path_in(self.container.directory, path)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Writes a file as the container's user, and makes its directories.

        Raises:
            PermissionError, IsADirectoryError: as the container says.
            SandboxUnavailableError: as for exec.
            TimeoutError: the link is too slow for a file of that size.
        """
        path = self._path(file)

        def work(connection: Connection) -> None:
            data = contents.encode(errors="replace") if isinstance(contents, str) else contents
            right = _WRITABLE if self.container.is_roots else _ANY
            self._file_call(connection, _WRITE, path, [right, str(PurePosixPath(path).parent)], data, len(data))

        with file_errors(file):
            await self._on_machine(work)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Reads a file as the container's user.

        Raises:
            FileNotFoundError, PermissionError, IsADirectoryError: as the container says.
            UnicodeDecodeError: it is not UTF-8 although text was asked for.
            OutputLimitExceededError: it is too large.
            SandboxUnavailableError: as for exec.
            TimeoutError: the link is too slow for a file of the size that may be read.
        """
        limit_bytes = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        path = self._path(file)

        def work(connection: Connection) -> str | bytes:
            right = _READABLE if self.container.is_roots else _ANY
            done = self._file_call(connection, _READ, path, [right, str(limit_bytes)], None, limit_bytes)
            if len(done.stdout) > limit_bytes:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), file)
            return done.stdout.decode() if text else done.stdout

        with file_errors(file):
            return await self._on_machine(work)

    def _file_call(
        self, connection: Connection, script: str, path: str, more: list[str], stdin: bytes | None, size: int
    ) -> Completed:
        """Reads or writes a file by the container's own programs.

        Raises:
            OSError: with the number that the container's words mean.
        """
        options = ["--workdir", "/", "--env", f"PATH={_PATH}", *([] if stdin is None else ["--interactive"])]
        argv = ["/bin/sh", "-c", _SCRIPT + script, "sh", path, *more]
        done = connection.run(
            ["docker", "exec", *options, self.container.identity, *argv], stdin=stdin or b"",
            timeout_seconds=SMALL_CALL_SECONDS + transfer_seconds(size), limit_bytes=size + (1 << 20),
        )  # fmt: skip
        if done.exit_code:
            if done.stderr.startswith(_ENGINE.encode()):
                self._require_running(connection)
            said = done.stderr.lower()
            number = next((number for words, number in _ERRORS if words in said), errno.EIO)
            raise OSError(number, os.strerror(number) if number != errno.EIO else _end(done), path)
        return done

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """Returns how a person gets a shell in the container. Asks no machine."""
        machine = await super().connection(user="root")
        identity = self.machines.environment.id
        who = ["--user", user] if user else []
        shell = ["docker", "exec", "--interactive", "--tty", *who, self.container.identity, "/bin/sh"]
        command = f"provisioner exec {identity} --user root --terminal -- {shlex.join(shell)}"
        return SandboxConnection(type=machine.type, command=command, container=self.container.identity)


def _timed_out(exit_code: int, seconds: float, timeout: float) -> bool:
    """Returns whether `timeout` ended the command: it says 124 itself, 137 if it had to kill, BusyBox's 143."""
    return exit_code == 124 or (exit_code in (137, 143) and seconds >= timeout)


def _as_a_machine_would(done: ExecResult[str], program: str) -> ExecResult[str]:
    """Returns what a machine's exec server says of a command that could not be started, for what the engine says of it.

    Raises:
        PermissionError: its program may not be executed.
    """
    said = (done.stdout or done.stderr).strip()
    if done.success or (done.stdout and done.stderr) or "\n" in said:
        return done  # the command's own words
    names = f'exec: "{program}": ' in said
    # GNU's and BusyBox's `timeout`, in whose place the program would have been started.
    limited = done.returncode == CANNOT_EXECUTE and re.match(r"(/usr/bin/)?timeout: ", said)
    if (limited or (said.startswith(_RUNTIME) and names)) and "ermission denied" in said:
        raise PermissionError(errno.EACCES, said)
    if said.startswith((_RUNTIME, _ENGINE)):
        return ExecResult(success=False, returncode=NOT_FOUND, stdout="", stderr=f"{said}\n")
    return done


async def start_services(machines: SampleMachines) -> dict[str, SandboxEnvironment]:
    """Starts the containers of a sample's machine, which a copy has already, and returns their sandboxes.

    Returns:
        the sandboxes, the default first.

    Raises:
        ServicesError: a service is not up.
        MachineLostError: the machine does not answer.
    """
    project = machines.project
    assert project is not None

    def work(connection: Connection) -> list[Container] | ServicesError:
        try:
            return running(project, connection) if machines.snapshot else start(project, connection)
        except ServicesError as error:  # raised, it would mean that the machine is lost
            return error

    def started() -> list[Container]:
        with machines.more_phases() as phases, phases.phase("services"):
            outcome = machines.on("primary", work)
            if isinstance(outcome, ServicesError):
                raise outcome
        return outcome

    containers = await launch(started, machines.cancelled)
    return {container.service: ServiceSandbox(machines, container) for container in containers}
