"""The services of a compose file as Inspect's sandboxes: containers of the Docker Engine in a sample's machine.

All goes through the machine's exec server, which starts commands in a container with the rights of `docker exec`.
Whatever the machine answers is checked: a container may have become the machine's root.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any, Literal, overload

from inspect_ai.util import (
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
)

from provisioner import strict_json
from provisioner.errors import MachineLostError
from provisioner.inspect.blocking import launch
from provisioner.inspect.compose import PROJECT
from provisioner.inspect.compose_project import DIRECTORY, SLICE, Project
from provisioner.inspect.losses import NotUpError, file_errors
from provisioner.inspect.sample import SampleMachines
from provisioner.inspect.sandbox import ProvisionerSandbox
from provisioner.printable import last_lines
from provisioner.ssh.calls import SMALL_CALL_SECONDS
from provisioner.ssh.connection import Connection
from provisioner.ssh.exchange import Completed, transfer_seconds
from provisioner.validation import shown

# Health checks bound it by themselves: a service that stays unhealthy ends the wait.
START_SECONDS = 1800
_COMPOSE = ("docker", "compose", "--ansi", "never", "--progress", "plain", "--file", f"{DIRECTORY}/compose.json")
# All containers together leave half a GiB of the machine's memory to its own programs, or a quarter of a small machine:
# the kernel ends the largest process before the machine does nothing else any more than wait for memory.
_LIMITED = f"""read -r _ kib _ < /proc/meminfo; reserve=$((kib / 4)); [ $reserve -lt 524288 ] || reserve=524288
systemctl set-property {SLICE} MemoryMax=$((kib - reserve))K && exec "$@"
"""
# Runs in the machine, and prints a line of JSON for each container: of the ids that are given after the project's name,
# else of all that Compose has made for the project. A service may have started others, and ended them meanwhile.
# Asks the engine itself, in HTTP/1.0: Docker's own commands take seconds to start without KVM.
_PROGRAM = """
import json, socket, sys, urllib.parse
labels = [f"com.docker.compose.project={sys.argv[1]}", "com.docker.compose.oneoff=False"]
of_project = "/containers/json?all=1&filters=" + urllib.parse.quote(json.dumps({"label": labels}))
def ask(path, default=None):
    with socket.socket(socket.AF_UNIX) as engine:
        engine.connect("/run/docker.sock")
        engine.sendall(f"GET {path} HTTP/1.0\\r\\n\\r\\n".encode())
        head, _, body = b"".join(iter(lambda: engine.recv(1 << 16), b"")).partition(b"\\r\\n\\r\\n")
    if head.split()[1] == b"404" and default is not None:
        return default
    if head.split()[1] != b"200":
        sys.exit(body.decode(errors="replace"))
    return json.loads(body)
for identity in sys.argv[2:] or [each["Id"] for each in ask(of_project)]:
    container = ask(f"/containers/{identity}/json", None if sys.argv[2:] else {})
    if not container:
        continue
    state, config, labels = container["State"], container["Config"], container["Config"]["Labels"] or {}
    print(json.dumps({
        "id": container["Id"], "service": labels.get("com.docker.compose.service", ""), "user": config["User"],
        "directory": config["WorkingDir"], "pid": state["Pid"], "status": state["Status"],
        "exit_code": state["ExitCode"], "health": (state.get("Health") or {}).get("Status", ""),
        "restarts": container["RestartCount"], "ports": container["NetworkSettings"]["Ports"],
    }))
"""
_MOST_PID = 1 << 22
# An exit code beyond it is that of a signal.
_SIGNALLED = 128
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_IDENTITY = re.compile(r"[0-9a-f]{12,64}")
_ADDRESS = re.compile(r"[0-9a-f.:]{0,45}")
_PORT = re.compile(r"\d{1,5}", re.ASCII)
_USER = re.compile(r"[^\0\n]{0,256}")
_DIRECTORY = re.compile(r"(?:/[^\0\n]{0,4095})?")

# Nothing of the image's own PATH or language. Root, whom the kernel allows everything, is refused what docker's sandbox
# refuses it.
_SCRIPT = f"""PATH={_PATH} LC_ALL=C; export PATH LC_ALL
fail() {{ echo "$1" >&2; exit 1; }}
if [ -d "$1" ]; then fail "Is a directory"; fi
if [ -e "$1" ] && [ ! -f "$1" ]; then fail "Not a regular file"; fi
if [ -e "$1" ]; then case $(stat -L -c %A -- "$1") in $2) ;; *) fail "Permission denied" ;; esac; fi
"""
# What becomes a device in the meantime is not read without end.
_READ = """if [ -f "$1" ] && [ "$(stat -L -c %s -- "$1")" -gt "$3" ]; then fail "File too large"; fi
exec head -c "$(($3 + 1))" -- "$1"
"""
_WRITE = """mkdir -p -- "$3" && exec tee -- "$1" > /dev/null
"""
_READABLE, _WRITABLE, _ANY = "?r*", "??w*", "*"
_ERRORS = (
    (b"file too large", errno.EFBIG),
    (b"not a regular file", errno.EINVAL),
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
        pid: its first process; 0 for whichever it is.
        ports: those of the machine at which its own can be reached.
    """

    service: str
    identity: str
    user: str
    directory: str
    pid: int = 0
    ports: tuple[dict[str, Any], ...] = ()

    @property
    def is_roots(self) -> bool:
        """Whether commands run as root, unless a call says otherwise."""
        return self.user.partition(":")[0] in ("", "0", "root")


class ServicesError(NotUpError):
    """A sample's services did not start."""


def start(project: Project, connection: Connection) -> list[Container]:
    """Starts a project's containers, waits until they run and are healthy, and returns those that run.

    Raises:
        ServicesError: as for running.
    """
    connection.write_file(f"{DIRECTORY}/compose.json", project.run.encode(), mode=0o600)
    up = (*_COMPOSE, "up", "--detach", "--no-build", "--pull", "never", "--wait", "--wait-timeout", str(START_SECONDS))
    done = connection.run(["sh", "-c", _LIMITED, "sh", *up], timeout_seconds=START_SECONDS + SMALL_CALL_SECONDS)
    return running(project, connection, _end(done))


def running(project: Project, connection: Connection, said: str = "") -> list[Container]:
    """Returns the containers of a project that run. In a copy, they were started in the machine that it is a copy of.

    Args:
        said: what Compose said when it started them.

    Raises:
        ServicesError: a service has no container, ended with an error, or is not healthy, or the default one has ended.
    """
    states = {state["service"]: state for state in _inspected(connection)}
    # `up --wait` fails if a service has ended, even with 0: what runs is asked, as docker's sandbox does.
    wrong = [name for name in project.services if not _is_well(states.get(name))]
    up = [states[name] for name in project.services if states.get(name, {}).get("status") == "running"]
    if wrong or not up:
        what = f"The service {wrong[0]} is not up: {_words(states.get(wrong[0]))}" if wrong else "No service runs"
        raise ServicesError(f"{what}.", details=said + _logs(connection, wrong))
    if (default := project.services[0]) != up[0]["service"]:
        raise ServicesError(
            f"The default service {default} has ended already: {_words(states[default])}. Give it a `command` that "
            "stays, as `tail -f /dev/null`, or mark another service with `x-default: true`."
        )
    return [
        Container(
            state["service"], state["id"], state["user"], state["directory"] or "/", state["pid"],
            _ports(state["ports"]),
        )
        for state in up
    ]  # fmt: skip


def _is_well(state: Mapping[str, Any] | None) -> bool:
    if state is None:
        return False
    if state["status"] == "running":
        return state.get("health") in ("", "healthy", None)
    return state["status"] == "exited" and state.get("exit_code") == 0


def _words(state: Mapping[str, Any] | None) -> str:
    if state is None:
        return "it has no container"
    health = f", {state['health']}" if state.get("health") else ""
    return shown(f"{state['status']}{health}, exit code {state.get('exit_code')}")[1:-1]


def _logs(connection: Connection, services: Sequence[str]) -> str:
    if not services:
        return ""
    done = connection.run([*_COMPOSE, "logs", "--no-color", "--tail", "40", services[0]])
    return f"\n{_end(done)}"


def _end(done: Completed) -> str:
    return last_lines((done.stdout + done.stderr).decode(errors="replace"), 4000)


def _inspected(connection: Connection, *identities: str) -> list[dict[str, Any]]:
    """Returns what the engine says of containers: of all services, unless some are named.

    Raises:
        ServicesError: it says nothing that can be said of a container.
    """
    done = connection.run(["engine", PROJECT, *identities], program=_PROGRAM)
    lines = done.stdout.splitlines()
    if done.exit_code or len(lines) != (len(identities) or len(lines)):
        raise ServicesError("The engine in the machine does not describe its containers.", details=_end(done))
    states = [_parsed(line) for line in lines]
    for state in states:
        match state:
            # Each command in the container names user and directory.
            case {
                "id": identity, "service": str(), "user": user, "directory": directory, "pid": int(pid),
                "restarts": int(), "status": str(), "ports": _,
            } if (
                _matches(_IDENTITY, identity) and _matches(_USER, user) and _matches(_DIRECTORY, directory)
                and 0 <= pid < _MOST_PID
            ):  # fmt: skip
                continue
        raise ServicesError(f"The engine in the machine does not describe a container of its own: {shown(str(state))}")
    return states


def _ports(given: object) -> tuple[dict[str, Any], ...]:
    """Returns published ports as a SandboxConnection has them; none that no engine can have published."""
    mappings = []
    for name, places in given.items() if isinstance(given, dict) else ():
        match = re.fullmatch(r"(\d{1,5})/(tcp|udp)", str(name), re.ASCII)
        found = [
            {"host_ip": place["HostIp"], "host_port": int(place["HostPort"])}
            for place in (places if isinstance(places, list) else ())
            if isinstance(place, dict)
            and _matches(_ADDRESS, place.get("HostIp"))
            and _matches(_PORT, place.get("HostPort"))
        ]
        if match and found:
            mappings.append({"container_port": int(match[1]), "protocol": match[2], "mappings": found})
    return tuple(mappings)


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and bool(pattern.fullmatch(value))


def _parsed(line: bytes) -> Any:
    try:
        return strict_json.parse(line)
    except ValueError as error:
        raise ServicesError(f"The engine in the machine answers what is no JSON: {error}.") from error


class ServiceSandbox(ProvisionerSandbox):
    """One service of a sample, a container in its machine.

    Args:
        machines: the sample's machine.
        container: which of its containers.
    """

    def __init__(self, machines: SampleMachines, container: Container) -> None:
        super().__init__(machines, "primary", "", container.directory, {})
        # With another first process once the engine has started it again.
        self.container = container

    def _run(self, connection: Connection, argv: list[str], **options: Any) -> Completed:
        """Runs a command in the container, with the rights of `docker exec`.

        Raises:
            ServicesError: the container does not run.
        """
        done = super()._run(connection, argv, container=(self.container.identity, self.container.pid), **options)
        is_silent = not (done.stdout_size.total_bytes or done.stderr_size.total_bytes)
        if done.errno in (errno.ESRCH, errno.ESTALE) or (done.exit_code > _SIGNALLED and is_silent):
            self._ask_engine(connection)
        if done.errno == errno.ESTALE:  # nothing ran
            return super()._run(connection, argv, container=(self.container.identity, self.container.pid), **options)
        return done

    def _ask_engine(self, connection: Connection) -> None:
        """Asks the engine whether the container runs, and notes if it was started again.

        Raises:
            ServicesError: it does not run.
            MachineLostError: it was started again, which the configuration takes for a loss.
        """
        [state] = _inspected(connection, self.container.identity)
        if state["status"] != "running":
            said = shown(f"{state['status']}, exit code {state.get('exit_code')}")
            error = ServicesError(f"The container of the service {self.container.service} does not run: {said}.")
            error.service = self.container.service
            raise error
        if self.container.pid not in (0, state["pid"]):
            words = (
                f"The engine has started the container of the service {self.container.service} again (restarts so far: "
                f"{state['restarts']}): what ran in it has ended."
            )
            if self.machines.configuration.on_restart == "fail":
                raise MachineLostError(words)
            self.machines.notes.append(words)
        self.container = replace(self.container, pid=state["pid"], ports=_ports(state["ports"]))

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
            done = self._file_call(connection, _READ, path, [right, str(limit_bytes)], b"", limit_bytes)
            if len(done.stdout) > limit_bytes:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), file)
            return done.stdout.decode() if text else done.stdout

        with file_errors(file):
            return await self._on_machine(work)

    def _file_call(
        self, connection: Connection, script: str, path: str, more: list[str], stdin: bytes, size: int
    ) -> Completed:
        """Reads or writes a file by the container's own programs.

        Raises:
            OSError: with the number that the container's words mean.
        """
        done = self._run(
            connection, ["/bin/sh", "-c", _SCRIPT + script, "sh", path, *more], user="", cwd="/",
            environment={"PATH": _PATH}, stdin=stdin, timeout_seconds=SMALL_CALL_SECONDS + transfer_seconds(size),
            limit_bytes=size + (1 << 20),
        )  # fmt: skip
        if done.exit_code:
            said = b"" if done.errno else done.stderr.lower()
            number = next((number for words, number in _ERRORS if words in said), errno.EIO)
            raise OSError(number, os.strerror(number) if number != errno.EIO else _end(done), path)
        return done

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """Returns how a person gets a shell in the container. Asks no machine.

        Its ports are those of the machine, which `provisioner ssh ENV -- -L` takes.
        """
        machine = await super().connection(user="root")
        identity = self.machines.environment.id
        who = ["--user", user] if user else []
        shell = ["docker", "exec", "--interactive", "--tty", *who, self.container.identity, "/bin/sh"]
        command = f"provisioner ssh {identity} --user root -- -t {shlex.quote(shlex.join(shell))}"
        return SandboxConnection.model_validate(
            {
                "type": machine.type,
                "command": command,
                "ports": list(self.container.ports) or None,
                "container": self.container.identity,
            }
        )


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

    def started() -> list[Container]:
        with machines.more_phases() as phases, phases.phase("services"):
            return machines.on("primary", partial(running if machines.snapshot else start, project))

    containers = await launch(started, machines.cancelled)
    machines.memory.services = {container.identity: container.service for container in containers}
    return {container.service: ServiceSandbox(machines, container) for container in containers}
