"""Gives each command of the exec server a cgroup, which bounds the command and lets all its processes be ended.

The agent's commands go into the agent's cgroup (agent_cgroup.sh): they share its limits, and end before scoring. On a
Linux without such cgroups, only the command's process group is ended.
"""

from __future__ import annotations

import os
import subprocess
import time

ROOT = "/sys/fs/cgroup"
OURS = ROOT + "/provisioner"
AGENTS = ROOT + "/agent"
AGENT = "agent"
AGENT_PROGRAM = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "agent_cgroup.sh")
# The least memory that a command of root leaves to the rest of the system.
RESERVE_BYTES = 64 << 20
END_SECONDS = 20.0


def is_available() -> bool:
    """Returns whether this machine has cgroups of version 2, and this process may make some."""
    return os.geteuid() == 0 and os.path.exists(ROOT + "/cgroup.controllers") and os.access(ROOT, os.W_OK)


class Cgroup:
    """Holds the processes of one call.

    Args:
        name: unique; it begins with the id of the process that serves the call.
        user: whose command it is.
        inside: the cgroup of the container in which the command runs, whose limits are its own; None for the machine.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, name: str, user: str, inside: str | None = None) -> None:
        self._is_agents = False
        self.path: str | None = None
        if not is_available():
            return
        self._is_agents = user == AGENT and os.path.exists(AGENT_PROGRAM) and not inside
        parent = inside or (_agents() if self._is_agents else _ours())
        self.path = os.path.join(parent, "call-" + name)
        os.mkdir(self.path)
        if not self._is_agents and not inside:
            for file, limit in _limits().items():
                write(os.path.join(self.path, file), limit)

    def join(self) -> None:
        """Moves this process into it. For a new process, before anything of the user's runs.

        Raises:
            OSError: that is impossible, or the agent's processes are not let in, as it is being scored.
        """
        if self.path is None:
            return
        write(self.path + "/cgroup.procs", "0")
        if self._is_agents and read(AGENTS + "/pids.max").strip() == "0":
            raise BlockingIOError(11, "the agent's processes are not let in")

    def end(self) -> None:
        """Ends all processes in it, and removes it as far as that is possible."""
        if self.path is None:
            return
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            try:
                write(self.path + "/cgroup.kill", "1")
                if "populated 0" in read(self.path + "/cgroup.events"):
                    break
            except OSError:
                break
            time.sleep(0.02)
        self.leave()

    def leave(self) -> None:
        """Removes this cgroup and those of ended calls, unless processes in the background still use them."""
        if self.path is None:
            return
        parent = os.path.dirname(self.path)
        try:
            names = os.listdir(parent)
        except OSError:  # it went with its container
            return
        for name in names:
            path = os.path.join(parent, name)
            if name.startswith("call-") and (path == self.path or not os.path.exists("/proc/" + name.split("-")[1])):
                try:
                    os.rmdir(path)
                except OSError:  # in use, or another call was quicker
                    continue


def outlive_call() -> None:
    """Moves this process out of its call's cgroup, so that it outlives the call however the call ends."""
    if is_available():
        path = os.path.join(_ours(), "supervisors")
        os.makedirs(path, exist_ok=True)
        write(path + "/cgroup.procs", "0")


def _ours() -> str:
    if not os.path.exists(OURS):
        write(ROOT + "/cgroup.subtree_control", "+memory +pids")
        os.makedirs(OURS, exist_ok=True)
    write(OURS + "/cgroup.subtree_control", "+memory +pids")
    return OURS


def _agents() -> str:
    """Returns the agent's cgroup. The program that knows its limits makes it."""
    if not os.path.exists(AGENTS + "/logins"):
        subprocess.run(["/bin/sh", AGENT_PROGRAM, "reopen"], stdin=subprocess.DEVNULL, check=False)
    return AGENTS


def _limits() -> dict[str, str]:
    """Returns a command's limits: nearly all of the machine, so that a runaway command does not stop it."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    tasks = min(int(read("/proc/sys/kernel/threads-max")), int(read("/proc/sys/kernel/pid_max")))
    return {"memory.max": str(total - max(RESERVE_BYTES, total // 20)), "pids.max": str(tasks * 3 // 4)}


def read(path: str) -> str:
    """Returns what a file of a cgroup says."""
    with open(path, encoding="ascii") as file:
        return file.read()


def write(path: str, text: str) -> None:
    """Writes to a file of a cgroup that is there."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode("ascii"))
    finally:
        os.close(descriptor)
