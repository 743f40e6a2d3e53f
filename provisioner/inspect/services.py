"""What runs in a sample's machines: a compose file's containers, and services to be ready.

All goes through the machine's exec server, which starts commands in a container with the rights of `docker exec`.
Whatever the machine answers is checked: a container may have become the machine's root.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from provisioner.base import strict_json
from provisioner.base.errors import CommandTimeoutError
from provisioner.base.models import Destination
from provisioner.base.printable import beginning, last_lines, printable, printable_lines
from provisioner.base.validation import lines_of, shown
from provisioner.inspect.compose import PROJECT
from provisioner.inspect.compose_project import DIRECTORY, SLICE, Project
from provisioner.inspect.configuration import Machine
from provisioner.inspect.failures import NotUpError
from provisioner.ssh.calls import SMALL_CALL_SECONDS, Calls
from provisioner.ssh.connection import Connection
from provisioner.ssh.exchange import Completed, transfer_seconds

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
# An exit code beyond it is that of a signal.
SIGNALLED = 128
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_ADDRESS = re.compile(r"[0-9a-f.:]{0,45}")
_PORT = re.compile(r"\d{1,5}", re.ASCII)

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


class State(BaseModel):
    """What the engine says of a container. Each command in it names user and directory.

    Args:
        id: the engine's id of it.
        service: the service's name.
        user, directory: as the image or the file says.
        pid: its first process; 0 if it does not run.
        status, exit_code, health: in the engine's words.
        restarts: how often the engine has started it again.
        ports: those that are published.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    id: Annotated[str, Field(pattern="^[0-9a-f]{12,64}$")]
    service: str
    user: Annotated[str, Field(pattern=r"^[^\x00\n]*$", max_length=256)]
    directory: Annotated[str, Field(pattern=r"^(/[^\x00\n]*)?$", max_length=4096)]
    pid: Annotated[int, Field(ge=0, lt=1 << 22)]
    status: str
    exit_code: int
    health: str
    restarts: int
    ports: object

    @property
    def is_well(self) -> bool:
        """Whether it runs, and is healthy as far as the engine looks; or is done."""
        if self.status == "running":
            return self.health in ("", "healthy")
        return self.status == "exited" and self.exit_code == 0

    def __str__(self) -> str:
        health = f", {self.health}" if self.health else ""
        return shown(f"{self.status}{health}, exit code {self.exit_code}")[1:-1]


class ServicesError(NotUpError):
    """A sample's services did not start."""


def start(project: Project, connection: Connection, allowed: Sequence[Destination] = ()) -> list[Container]:
    """Starts a project's containers, waits until they run and are healthy, and returns those that run.

    Args:
        allowed: the destinations whose names the containers know: they read no hosts file of their machine.

    Raises:
        ServicesError: as for running.
    """
    file = json.loads(project.run)
    names = [f"{name}:{each.cidr.partition('/')[0]}" for each in allowed for name in each.host_names]
    for service in file["services"].values():
        # What shares another's network shares its names: the engine refuses names of its own.
        if not service.get("network_mode", "").startswith(("service:", "container:")):
            service["extra_hosts"] = [*(service.get("extra_hosts") or []), *names]
    connection.write_file(f"{DIRECTORY}/compose.json", json.dumps(file).encode(), mode=0o600)
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
    states = {state.service: state for state in inspect_containers(connection)}
    # `up --wait` fails if a service has ended, even with 0: what runs is asked, as docker's sandbox does.
    wrong = [name for name in project.services if name not in states or not states[name].is_well]
    up = [states[name] for name in project.services if name in states and states[name].status == "running"]
    if wrong or not up:
        state = states.get(wrong[0], "it has no container") if wrong else ""
        what = f"The service {wrong[0]} is not up: {state}" if wrong else "No service runs"
        raise ServicesError(f"{what}.", details=said + _logs(connection, wrong))
    if (default := project.services[0]) != up[0].service:
        raise ServicesError(
            f"The default service {default} has ended already: {states[default]}. Give it a `command` that stays, as "
            "`tail -f /dev/null`, or mark another service with `x-default: true`."
        )
    return [
        Container(each.service, each.id, each.user, each.directory or "/", each.pid, published_ports(each.ports))
        for each in up
    ]


def _logs(connection: Connection, services: Sequence[str]) -> str:
    if not services:
        return ""
    done = connection.run([*_COMPOSE, "logs", "--no-color", "--tail", "40", services[0]])
    return f"\n{_end(done)}"


def _end(done: Completed) -> str:
    return last_lines((done.stdout + done.stderr).decode(errors="replace"), 4000)


def inspect_containers(connection: Connection, *identities: str) -> list[State]:
    """Returns what the engine says of containers: of all services, unless some are named.

    Raises:
        ServicesError: it says nothing that can be said of a container.
    """
    done = connection.run(["engine", PROJECT, *identities], program=_PROGRAM)
    lines = done.stdout.splitlines()
    if done.exit_code or len(lines) != (len(identities) or len(lines)):
        raise ServicesError("The engine in the machine does not describe its containers.", details=_end(done))
    try:
        return [State.model_validate(strict_json.parse(line)) for line in lines]
    except ValueError as error:
        said = "; ".join(lines_of(error)) if isinstance(error, ValidationError) else f"no JSON: {error}"
        raise ServicesError(f"The engine in the machine does not describe a container of its own: {said}.") from error


def published_ports(given: object) -> tuple[dict[str, Any], ...]:
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


Run = Callable[..., Completed]


def read_file(run: Run, container: Container, path: str, limit_bytes: int) -> bytes:
    """Reads a file by the container's own programs.

    Args:
        run: runs a command in the container, as Connection.run does in the machine.

    Raises:
        OSError: with the number that the container's words mean; EFBIG if the file is larger than the limit.
    """
    right = _READABLE if container.is_roots else _ANY
    done = _file_call(run, _READ, path, [right, str(limit_bytes)], b"", limit_bytes)
    if len(done.stdout) > limit_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
    return done.stdout


def write_file(run: Run, container: Container, path: str, data: bytes) -> None:
    """Writes a file by the container's own programs, and makes its directories.

    Args:
        run: as for read_file.

    Raises:
        OSError: with the number that the container's words mean.
    """
    right = _WRITABLE if container.is_roots else _ANY
    _file_call(run, _WRITE, path, [right, str(PurePosixPath(path).parent)], data, len(data))


def _file_call(run: Run, script: str, path: str, more: list[str], stdin: bytes, size: int) -> Completed:
    done = run(
        ["/bin/sh", "-c", _SCRIPT + script, "sh", path, *more], user="", cwd="/", environment={"PATH": _PATH},
        stdin=stdin, timeout_seconds=SMALL_CALL_SECONDS + transfer_seconds(size), limit_bytes=size + (1 << 20),
    )  # fmt: skip
    if done.exit_code:
        said = b"" if done.errno else done.stderr.lower()
        number = next((number for words, number in _ERRORS if words in said), errno.EIO)
        raise OSError(number, os.strerror(number) if number != errno.EIO else _end(done), path)
    return done


# What a kernel writes to its console of each process that it ends.
_ON_CONSOLE = re.compile(r"^.*out of memory: Killed process .*$", re.IGNORECASE | re.MULTILINE)
_MORE = "raise `memory_gb` of its machine (in a compose file: `x-provisioner`, `machines`)"


def on_console(console: str) -> str:
    """Returns what a machine's console says last of being out of memory; empty if it says nothing of it."""
    lines = _ON_CONSOLE.findall(console)
    return f"Its console says: {beginning(printable(lines[-1].strip()), 300)}. So {_MORE}." if lines else ""


READY_SECONDS = 300.0
# What a machine says is bounded: of the journal's last lines.
_MOST_BYTES = 64 << 10
_SHOWN_CHARACTERS = 2000
_CALL_SECONDS = 60.0
_WAIT = 'until bash -c "$1"; do sleep 0.5; done > /dev/null 2>&1'
_CONNECT = "exec 3<>/dev/tcp/127.0.0.1/{}"


def wait_until_ready(machine: Machine, connection: Calls) -> None:
    """Waits until `ready` of a machine succeeds.

    Raises:
        NotUpError: it does not in READY_SECONDS; the details are what its services have said last.
    """
    command = _CONNECT.format(machine.ready) if isinstance(machine.ready, int) else machine.ready
    try:
        connection.run(["bash", "-c", _WAIT, "ready", command], timeout_seconds=READY_SECONDS)
    except CommandTimeoutError:
        what = f"nothing listens at port {machine.ready}" if isinstance(machine.ready, int) else "`ready` fails"
        raise NotUpError(
            f"Machine {machine.name} is not ready: {what} after {READY_SECONDS:.0f} s.",
            details=_journal(machine, connection),
        ) from None


def _journal(machine: Machine, connection: Calls) -> str:
    """Returns the last lines of the journal of a machine's services."""
    if not machine.services:
        return ""
    units = [f"--unit={name}.service" for name, _ in machine.services]
    show = ["journalctl", "--no-pager", "--output=short", "--lines=20", *units]
    done = connection.run(show, limit_bytes=_MOST_BYTES, timeout_seconds=_CALL_SECONDS)
    return last_lines(printable_lines(done.stdout.decode(errors="replace")), _SHOWN_CHARACTERS)
