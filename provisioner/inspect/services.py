"""What runs in a sample's machines: a compose file's containers, services to be ready, and memory that is short.

All goes through the machine's exec server, which starts commands in a container with the rights of `docker exec`.
Whatever the machine answers is checked: a container may have become the machine's root.
"""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from provisioner.base import strict_json
from provisioner.base.errors import CommandTimeoutError
from provisioner.base.models import Destination, Role
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


# Runs in the machine. The kernel's lines are records of their own, which no process of a container can write. How often
# the engine has started a container again stands in the container's file.
MEMORY_PROGRAM = """
import glob, json, os
file, kills, restarts = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK), [], {}
for _ in range(100000):
    try:
        line = os.read(file, 8192).decode("utf-8", "replace").split("\\n")[0]
    except BlockingIOError:
        break
    except OSError:  # it was overwritten meanwhile
        continue
    if ";oom-kill:" in line:
        kills.append(line[:1000])
for path in glob.glob("/var/lib/docker/containers/*/config.v2.json")[:200]:
    try:
        with open(path) as config:
            restarts[path.split("/")[-2]] = json.load(config)["RestartCount"]
    except (OSError, ValueError, KeyError):  # it was removed meanwhile, or is being written
        continue
with open("/proc/pressure/memory") as pressure:
    print(json.dumps([kills[-5:], pressure.read(1000), restarts]))
"""
# A machine that needs longer is cut off, and with it other calls.
MEMORY_SECONDS = 30.0
# Of the last minute: so much of the time all processes wait for memory in a machine that does nothing else any more.
WAITING_PERCENT = 20.0
MOST_SENTENCES = 100
_MOST_KILLS, _MOST_KILL_CHARACTERS, _MOST_RESTARTS = 5, 1000, 1_000_000
_KILL = re.compile(
    r"\d{1,3},(?P<line>\d{1,20},\d{1,20}),[^;]*;oom-kill:constraint=\w+,.*task_memcg=(?P<cgroup>[^,]*),"
    r"task=(?P<task>.{0,64}),pid=(?P<pid>\d{1,10}),uid=\d{1,10}",
    re.ASCII,
)
_CONTAINER = re.compile(r"docker-([0-9a-f]{64})\.scope")
_LIMIT_OF_CONTAINER = re.compile(r",oom_memcg=[^,]*docker-[0-9a-f]{64}\.scope")
_FULL = re.compile(r"^full avg10=[\d.]{1,10} avg60=(\d{1,3}\.\d\d) ", re.ASCII | re.MULTILINE)
# What a kernel writes to its console of each process that it ends.
_ON_CONSOLE = re.compile(r"^.*out of memory: Killed process .*$", re.IGNORECASE | re.MULTILINE)
_MORE = "raise `memory_gb` of its machine (in a compose file: `x-provisioner`, `machines`)"


@dataclass(frozen=True)
class Sentence:
    """What was told of a machine's memory.

    Args:
        role: which machine.
        at: when, in seconds of the monotonic clock.
        words: the sentence.
        service: the service in which the kernel ended a process; empty for none.
    """

    role: Role
    at: float
    words: str
    service: str = ""


class Watch:
    """Keeps what was told of the memory of a sample's machines, and of containers that were started again.

    Several threads may look at once. What it keeps is bounded, whatever the machines say.

    Attributes:
        services: the names of services, by the engine's ids of their containers.
        restarts: how often the engine has started a service again, if it has.
    """

    def __init__(self) -> None:
        self.services: dict[str, str] = {}
        self.restarts: dict[str, int] = {}
        self._lock = threading.Lock()
        self._told: deque[Sentence] = deque(maxlen=MOST_SENTENCES)
        # The kernel's lines that were told of each machine. It says its last ones again and again.
        self._lines: dict[Role, deque[str]] = {}

    @property
    def sentences(self) -> list[Sentence]:
        """What was told of all machines, the latest last."""
        with self._lock:
            return list(self._told)

    def since(self, role: Role, begin: float, service: str = "") -> list[str]:
        """Returns what was told of a machine since a time of the monotonic clock, the latest last.

        Args:
            service: a service of which the last that was told counts, whenever that was; empty for none.
        """
        told = [sentence for sentence in self.sentences if sentence.role == role]
        last = [sentence for sentence in told if service and sentence.service == service][-1:]
        return [sentence.words for sentence in told if sentence.at >= begin or sentence in last]

    def look(
        self, role: Role, connection: Calls, memory_gib: float, timeout_seconds: float = MEMORY_SECONDS
    ) -> list[str]:
        """Returns what is new of a machine that is out of memory, a sentence each.

        Args:
            memory_gib: what the machine has.
            timeout_seconds: how long the machine may take to say it.

        Raises:
            ProvisionerError: the machine does not say it in time.
            ValueError: what it says is no JSON.
        """
        done = connection.run(["memory"], program=MEMORY_PROGRAM, timeout_seconds=timeout_seconds, limit_bytes=32 << 10)
        match strict_json.parse(done.stdout, maximum_values=1000):
            case [list(kills), str(pressure), dict(restarts)]:
                with self._lock:
                    new = [*self._ended(role, kills, memory_gib), *_waiting(role, pressure, memory_gib)]
                    self._told += new
                    for identity, service in self.services.items():
                        if isinstance(count := restarts.get(identity), int) and 0 < count < _MOST_RESTARTS:
                            self.restarts[service] = count
                return [sentence.words for sentence in new]
        return []

    def _ended(self, role: Role, kills: list[object], memory_gib: float) -> Iterator[Sentence]:
        lines = self._lines.setdefault(role, deque(maxlen=MOST_SENTENCES))
        for said in kills[-_MOST_KILLS:]:
            kill = _KILL.match(said[:_MOST_KILL_CHARACTERS]) if isinstance(said, str) else None
            if kill and kill["line"] not in lines:
                lines.append(kill["line"])
                yield self._sentence(role, kill, memory_gib)

    def _sentence(self, role: Role, kill: re.Match[str], memory_gib: float) -> Sentence:
        container = _CONTAINER.search(kill["cgroup"])
        service = self.services.get(container[1]) if container else ""
        where = f" in {f'the service {service}' if service else 'a service'}" if container else ""
        begin = f"The kernel ended {printable(kill['task'])} (process {kill['pid']}){where}, out of memory: "
        why = f"the machine's {memory_gib:g} GiB are full; {_MORE}."
        if _LIMIT_OF_CONTAINER.search(kill[0]):
            why = "it has reached the container's own limit; raise `mem_limit` of the service."
        return Sentence(role, time.monotonic(), begin + why, service or "")


def _waiting(role: Role, pressure: str, memory_gib: float) -> Iterator[Sentence]:
    waiting = _FULL.search(pressure)
    if waiting and float(waiting[1]) >= WAITING_PERCENT:
        words = (
            f"The machine's {memory_gib:g} GiB of memory are full: for {float(waiting[1]):.0f} % of the last minute "
            f"all its processes waited for memory; {_MORE}."
        )
        yield Sentence(role, time.monotonic(), words)


def on_console(console: str) -> str:
    """Returns what a machine's console says last of being out of memory; empty if it says nothing of it."""
    lines = _ON_CONSOLE.findall(console)
    return f"Its console says: {beginning(printable(lines[-1].strip()), 300)}. So {_MORE}." if lines else ""


READY_SECONDS = 300.0
# A service that has ended stays up if it does so for STEADY_SECONDS. If it fails for longer than FAILING_SECONDS, it
# never does. Where it has ended ENDS times before, that is told.
STEADY_SECONDS, FAILING_SECONDS, ENDS = 10.0, 60.0, 3
PAUSE_SECONDS = 1.0
# What a machine says is bounded: of a few properties of each service, and of the journal's last lines.
_MOST_BYTES = 64 << 10
_SHOWN_CHARACTERS = 2000
_CALL_SECONDS = 60.0
_WAIT = 'until bash -c "$1"; do sleep 0.5; done > /dev/null 2>&1'
_CONNECT = "exec 3<>/dev/tcp/127.0.0.1/{}"


def wait_until_ready(machine: Machine, connection: Calls, pause: Callable[[], None]) -> list[str]:
    """Waits until `ready` of a machine succeeds, and those of its services that have ended stay up.

    Args:
        pause: waits a moment; raises an exception if the sample was cancelled.

    Returns:
        what is to be told of services that have ended again and again.

    Raises:
        NotUpError: it does not become ready in READY_SECONDS, or a service fails for FAILING_SECONDS.
    """
    if machine.ready:
        _wait_for(machine, connection)
    services = dict(machine.services)
    if not services:
        return []
    begin = since = time.monotonic()
    ends: dict[str, int] = {}
    failed: set[str] = set()
    while True:
        before = ends
        ends, failing = _looked_at(services, connection)
        failed |= failing
        at = time.monotonic()
        since = since if ends == before else at
        if machine.ready or not any(ends.values()) or at - since >= STEADY_SECONDS:
            break
        if at - begin >= FAILING_SECONDS:
            if wrong := [name for name, count in ends.items() if name in failed and count >= ENDS]:
                said = f"{_said(machine, wrong[0], ends)}, and does not stay up."
                raise NotUpError(said, details=_journal(wrong[0], connection))
            break
        pause()
    return [
        f"{_said(machine, name, ends)}. It said last:\n{_journal(name, connection)}"
        for name, count in ends.items()
        if count >= ENDS
    ]


def _wait_for(machine: Machine, connection: Calls) -> None:
    command = _CONNECT.format(machine.ready) if isinstance(machine.ready, int) else machine.ready
    try:
        connection.run(["bash", "-c", _WAIT, "ready", command], timeout_seconds=READY_SECONDS)
    except CommandTimeoutError:
        ends, _ = _looked_at(dict(machine.services), connection)
        told = [f"{_said(machine, name, ends)}:\n{_journal(name, connection)}" for name, count in ends.items() if count]
        what = f"nothing listens at port {machine.ready}" if isinstance(machine.ready, int) else "`ready` fails"
        raise NotUpError(
            f"Machine {machine.name} is not ready: {what} after {READY_SECONDS:.0f} s.", details="\n".join(told)
        ) from None


def _looked_at(services: dict[str, str], connection: Calls) -> tuple[dict[str, int], set[str]]:
    """Returns how often each service has ended, and those whose last end was a failure."""
    units = {f"{name}.service": name for name in services}
    show = ["systemctl", "show", "--property=Id,NRestarts,Result", *units]
    said = connection.run(show, limit_bytes=_MOST_BYTES, timeout_seconds=_CALL_SECONDS).stdout.decode(errors="replace")
    ends, failing = {}, set()
    for block in said.split("\n\n"):
        state = dict(line.partition("=")[::2] for line in block.splitlines())
        if (name := units.get(state.get("Id", ""))) is not None:
            count = state.get("NRestarts", "")
            ends[name] = int(count) if count.isascii() and count.isdigit() and len(count) < 10 else 0
            failing |= {name} if state.get("Result", "success") != "success" else set()
    return ends, failing


def _said(machine: Machine, name: str, ends: dict[str, int]) -> str:
    return f"The service {name} of machine {machine.name} has ended {ends[name]} times"


def _journal(name: str, connection: Calls) -> str:
    """Returns the last lines of a service's journal."""
    show = ["journalctl", "--no-pager", "--output=cat", "--lines=20", f"--unit={name}.service"]
    done = connection.run(show, limit_bytes=_MOST_BYTES, timeout_seconds=_CALL_SECONDS)
    return last_lines(printable_lines(done.stdout.decode(errors="replace")), _SHOWN_CHARACTERS)
