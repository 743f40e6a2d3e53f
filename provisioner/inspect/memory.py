"""Asks a machine's kernel what it ended for want of memory, and says it with what to raise.

What the machine says is bounded and printable. It is told to people, and decides nothing.
"""

from __future__ import annotations

import re

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
            restarts[path.split("/")[5]] = json.load(config)["RestartCount"]
    except (OSError, ValueError, KeyError):  # it was removed meanwhile, or is being written
        continue
with open("/proc/pressure/memory") as pressure:
    print(json.dumps([kills[-5:], pressure.read(1000), restarts]))
"""
# A machine that needs longer is cut off, and with it other calls.
SECONDS = 30.0
# Of the last minute: so much of the time all processes wait for memory in a machine that does nothing else any more.
WAITING_PERCENT = 20.0
_MOST_SENTENCES, _MOST_RESTARTS = 100, 1_000_000
_KILL = re.compile(
    r"\d+,(?P<number>\d+),[^;]*;oom-kill:constraint=\w+,.*task_memcg=(?P<cgroup>[^,]*),"
    r"task=(?P<task>.*),pid=(?P<pid>\d+),uid=\d+",
    re.ASCII,
)
_CONTAINER = re.compile(r"docker-([0-9a-f]{64})\.scope")
_LIMIT_OF_CONTAINER = re.compile(r",oom_memcg=[^,]*docker-[0-9a-f]{64}\.scope")
_FULL = re.compile(r"^full avg10=[\d.]+ avg60=(\d{1,3}\.\d\d) ", re.ASCII | re.MULTILINE)
# What a kernel writes to its console of each process that it ends.
_ON_CONSOLE = re.compile(r"^.*out of memory: Killed process .*$", re.IGNORECASE | re.MULTILINE)
_MORE = "raise `memory_gb` of its machine (in a compose file: `x-provisioner`, `machines`)"


class Watch:
    """Keeps what was told of the memory of a sample's machines, and of containers that were started again.

    Attributes:
        services: the names of services, by the engine's ids of their containers.
        sentences: what was told of memory, the latest last.
        restarts: how often the engine has started a service again, if it has.
    """

    def __init__(self) -> None:
        self.services: dict[str, str] = {}
        self.sentences: list[str] = []
        self.restarts: dict[str, int] = {}
        self._told: set[tuple[Role, str]] = set()

    def look(self, role: Role, connection: Calls, memory_gib: float, timeout_seconds: float = SECONDS) -> list[str]:
        """Returns what is new of a machine's want of memory, a sentence each.

        Args:
            memory_gib: what the machine has.
            timeout_seconds: how long the machine may take to say it.

        Raises:
            ProvisionerError: the machine does not say it in time.
            ValueError: what it says is no JSON.
        """
        done = connection.run(["memory"], program=PROGRAM, timeout_seconds=timeout_seconds, limit_bytes=32 << 10)
        new = []
        match strict_json.parse(done.stdout, maximum_values=1000):
            case [list(kills), str(pressure), dict(restarts)]:
                for kill in [found for kill in kills if isinstance(kill, str) and (found := _KILL.match(kill))]:
                    if (role, kill["number"]) not in self._told:
                        self._told.add((role, kill["number"]))
                        new.append(self._sentence(kill, memory_gib))
                waiting = _FULL.search(pressure)
                if waiting and float(waiting[1]) >= WAITING_PERCENT:
                    new.append(
                        f"The machine's {memory_gib:g} GiB of memory are full: for {float(waiting[1]):.0f} % of the "
                        f"last minute all its processes waited for memory; {_MORE}."
                    )
                for identity, service in self.services.items():
                    if isinstance(count := restarts.get(identity), int) and 0 < count < _MOST_RESTARTS:
                        self.restarts[service] = count
        self.sentences = [*self.sentences, *new][-_MOST_SENTENCES:]
        return new

    def _sentence(self, kill: re.Match[str], memory_gib: float) -> str:
        container = _CONTAINER.search(kill["cgroup"])
        service = self.services.get(container[1]) if container else ""
        where = f" in {f'the service {service}' if service else 'a service'}" if container else ""
        begin = f"For want of memory the kernel ended {printable(kill['task'])} (process {kill['pid']}){where}: "
        if _LIMIT_OF_CONTAINER.search(kill[0]):
            return f"{begin}it has reached the container's own limit; raise `mem_limit` of the service."
        return f"{begin}the machine's {memory_gib:g} GiB are full; {_MORE}."


def on_console(console: str) -> str:
    """Returns what a machine's console says last of a want of memory; empty if it says nothing of it."""
    lines = _ON_CONSOLE.findall(console)
    return f"Its console says: {beginning(printable(lines[-1].strip()), 300)}. So {_MORE}." if lines else ""
