"""Asks a machine's kernel what it ended for want of memory, and says it with what to raise.

What the machine says is bounded and printable, and nothing but a note in the sample's log depends on it.
"""

from __future__ import annotations

import re
from weakref import WeakKeyDictionary

from provisioner import strict_json
from provisioner.printable import printable
from provisioner.ssh.calls import Calls

# Runs in the machine. The kernel's lines are records of their own, which no process of a container can write.
PROGRAM = """
import json, os
file, kills = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK), []
for _ in range(100000):
    try:
        line = os.read(file, 8192).decode("utf-8", "replace").split("\\n")[0]
    except BlockingIOError:
        break
    except OSError:  # it was overwritten meanwhile
        continue
    if ";oom-kill:" in line:
        kills.append(line[:1000])
with open("/proc/pressure/memory") as pressure:
    print(json.dumps([kills[-5:], pressure.read(1000)]))
"""
# A machine that needs longer is cut off, and with it other calls.
SECONDS = 30.0
# Of the last minute: so much of the time all processes wait for memory in a machine that does nothing else any more.
WAITING_PERCENT = 20.0
_KILL = re.compile(
    r"\d+,(?P<number>\d+),[^;]*;oom-kill:constraint=(?P<constraint>\w+),.*task_memcg=(?P<cgroup>[^,]*),"
    r"task=(?P<task>.*),pid=(?P<pid>\d+),uid=\d+",
    re.ASCII,
)
_FULL = re.compile(r"^full avg10=[\d.]+ avg60=(\d{1,3}\.\d\d) ", re.ASCII | re.MULTILINE)
_MORE = "raise `memory_gb` of its machine (under `x-provisioner` in a compose file)"

# The numbers of the kernel's lines that were told, by the machines.
_told: WeakKeyDictionary[object, set[int]] = WeakKeyDictionary()


def shortage(machines: object, connection: Calls, memory_gib: float, services: dict[str, str]) -> list[str]:
    """Returns what is new of a machine's want of memory, a sentence each.

    Args:
        machines: the sample's; each line of their kernel is told once.
        memory_gib: what the machine has.
        services: names of services, by the engine's ids of their containers.

    Raises:
        ProvisionerError: the machine does not say it in time.
        ValueError: what it says is no JSON.
    """
    done = connection.run(["memory"], program=PROGRAM, timeout_seconds=SECONDS, limit_bytes=16 << 10)
    said = strict_json.parse(done.stdout, maximum_values=20)
    told = _told.setdefault(machines, set())
    sentences = []
    match said:
        case [list(kills), str(pressure)]:
            for kill in [found for kill in kills if isinstance(kill, str) and (found := _KILL.match(kill))]:
                if int(kill["number"]) not in told:
                    told.add(int(kill["number"]))
                    sentences.append(_sentence(kill, memory_gib, services))
            waiting = _FULL.search(pressure)
            if waiting and float(waiting[1]) >= WAITING_PERCENT:
                sentences.append(
                    f"The machine's {memory_gib:g} GiB of memory are full: for {float(waiting[1]):.0f} % of the last "
                    f"minute all its processes waited for memory; {_MORE}."
                )
    return sentences


def _sentence(kill: re.Match[str], memory_gib: float, services: dict[str, str]) -> str:
    container = re.search(r"docker-([0-9a-f]{64})\.scope", kill["cgroup"])
    service = services.get(container[1], "another service") if container else ""
    where = f" in {service}" if service else ""
    begin = f"For want of memory the kernel ended {printable(kill['task'])} (process {kill['pid']}){where}: "
    if kill["constraint"] == "CONSTRAINT_MEMCG":
        return f"{begin}it has reached the limit of its container or command."
    return f"{begin}the machine's {memory_gib:g} GiB are full; {_MORE}."
