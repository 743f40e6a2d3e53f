"""Ends or moves the processes that an operation of the family leaves in its call's cgroup.

When an operation's time is over, all its processes are ended, whatever sessions they made. A process that a scoring
leaves running as agent may be the agent's own program. It is moved to the agent's cgroup, and so ends before the next
scoring.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
# The exec server makes one for each call, and no other program uses this name (cgroup.py).
CALL = "/provisioner/call-"
AGENTS = ROOT / "agent/logins"
SCORINGS = frozenset({"score", "intermediate_score", "aggregate_scores"})
SECONDS = 20.0
PAUSE_SECONDS = 0.02


def clear(operation: str, agent: int | None, *, in_time: bool) -> None:
    """End or move the processes that an operation has left. Does nothing where calls have no cgroups.

    Args:
        operation: its name.
        agent: the agent's user id; None if there is no agent.
        in_time: whether it ended by itself.
    """
    cgroup = own_cgroup()
    if cgroup is None:
        return
    if not in_time:
        _repeat(cgroup, lambda _: True, lambda pid: os.kill(pid, signal.SIGKILL))
    elif operation in SCORINGS and agent is not None and AGENTS.is_dir():
        _repeat(cgroup, lambda pid: is_agents(pid, agent), lambda pid: _write(AGENTS / "cgroup.procs", str(pid)))


def own_cgroup() -> Path | None:
    """Return this process's cgroup; None if it is not that of a call."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            if line.startswith("0::" + CALL):
                return ROOT / line[len("0::/") :]
    return None


def is_agents(pid: int, agent: int) -> bool:
    """Return whether a process has the agent's rights, or is in a user namespace, where it may have other ids.

    Raises:
        OSError: it has ended.
    """
    process = Path("/proc") / str(pid)
    for line in (process / "status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("Uid:") and str(agent) in line.split():
            return True
    return os.stat(process / "ns/user").st_ino != os.stat("/proc/self/ns/user").st_ino


def _repeat(cgroup: Path, concerns: Callable[[int], bool], act: Callable[[int], object]) -> None:
    """Apply `act` to every other matching process in the cgroup until none is left or 20 s have passed."""
    if not _concerned(cgroup, concerns):
        return
    deadline = time.monotonic() + SECONDS
    with _nothing_starts(cgroup / "pids.max"):
        while (left := _concerned(cgroup, concerns)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(OSError):  # it has ended
                    act(pid)
            time.sleep(PAUSE_SECONDS)


def _concerned(cgroup: Path, concerns: Callable[[int], bool]) -> list[int]:
    """Return the matching processes, and those that ended just now: they may have started others."""
    left = []
    for pid in map(int, (cgroup / "cgroup.procs").read_text(encoding="ascii").split()):
        try:
            if pid != os.getpid() and concerns(pid):
                left.append(pid)
        except OSError:
            left.append(pid)
    return left


@contextlib.contextmanager
def _nothing_starts(limit: Path) -> Iterator[None]:
    before = limit.read_text(encoding="ascii")
    _write(limit, "0")
    try:
        yield
    finally:
        _write(limit, before)


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode("ascii"))
    finally:
        os.close(descriptor)
