"""Asks a machine's kernel what it ended when out of memory, and says it with what to raise.

What the machine says is bounded and printable. It is told to people, and decides nothing.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from provisioner import strict_json
from provisioner.models import Role
from provisioner.printable import beginning, printable
from provisioner.ssh.calls import Calls

# Runs in the machine. The kernel's lines are records of their own, which no process of a container can write. How often
# the engine has started a container again stands in the container's file.
PROGRAM = """
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
SECONDS = 30.0
# Of the last minute: so much of the time all processes wait for memory in a machine that does nothing else any more.
WAITING_PERCENT = 20.0
MOST_SENTENCES = 100
_MOST_KILLS, _MOST_CHARACTERS, _MOST_RESTARTS = 5, 1000, 1_000_000
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

    def look(self, role: Role, connection: Calls, memory_gib: float, timeout_seconds: float = SECONDS) -> list[str]:
        """Returns what is new of a machine that is out of memory, a sentence each.

        Args:
            memory_gib: what the machine has.
            timeout_seconds: how long the machine may take to say it.

        Raises:
            ProvisionerError: the machine does not say it in time.
            ValueError: what it says is no JSON.
        """
        done = connection.run(["memory"], program=PROGRAM, timeout_seconds=timeout_seconds, limit_bytes=32 << 10)
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
            kill = _KILL.match(said[:_MOST_CHARACTERS]) if isinstance(said, str) else None
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
