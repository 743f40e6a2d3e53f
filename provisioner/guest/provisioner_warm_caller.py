"""Asks the warm interpreter (provisioner_warm.py) for the process of an operation. Never waits long for it.

Whatever is wrong with it, the answer is None, and an interpreter is started as if there were none. Root in the machine
can put anything in its place, as it can in the place of the interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import struct
import subprocess
import time
from pathlib import Path
from typing import Any, BinaryIO

import provisioner_leftovers

# For these, an interpreter that is started leaves a warm one behind.
STARTERS = frozenset({"warm_up", "start", "score", "intermediate_score", "aggregate_scores"})
USERS = STARTERS | {"teardown"}
# An operation waits no longer for a warm interpreter that does not answer.
ANSWER_SECONDS = 5.0
LONGEST_MESSAGE = 64
MOST_PROCESSES = 1 << 22  # Linux knows no larger process id
SOCKET = "socket"
CGROUP = provisioner_leftovers.ROOT / "provisioner/warm"
# What a process inherits from its parent, of the lines in /proc/self/status.
INHERITED = frozenset({
    "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs",
    "Seccomp", "Cpus_allowed", "Mems_allowed", "THP_enabled",
})  # fmt: skip


class Process:
    """The process of an operation: a fork of the warm interpreter, which tells how it ends.

    Args:
        connection: to the warm interpreter.
        pid: the process. It keeps its number until its end has been asked for and told.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self.pid = pid

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code as subprocess.Popen does: negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it has not ended within that many seconds.
        """
        self._connection.settimeout(timeout)
        try:
            message = self._connection.recv(LONGEST_MESSAGE)
        except TimeoutError:
            raise subprocess.TimeoutExpired("the operation", timeout or 0) from None
        except OSError:
            message = b""
        ended = re.fullmatch(rb"ended (-?[0-9]{1,3})", message)
        if ended is None:  # whoever was to tell has been killed
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
        self._connection.close()
        return int(ended[1]) if ended else -signal.SIGKILL


class Caller:
    """Asks for processes that are like those of one command.

    Args:
        directory: where the socket is.
        command: the command line that starts an interpreter.
        environment: its variables.
        cwd: its working directory.
    """

    def __init__(self, directory: Path, command: list[str], environment: dict[str, str], cwd: Path) -> None:
        self._directory = directory
        self._cwd = cwd
        self._facts = json.dumps(
            {"command": command, "environment": environment, "surroundings": _surroundings()}, sort_keys=True
        )

    def keeping(self) -> dict[str, Any] | None:
        """Return what an interpreter that is started now needs to know to leave a warm one behind. None if none may."""
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True, parents=True)
            os.close(_opened(self._directory))
        except OSError:
            return None
        return {
            "directory": str(self._directory),
            "cgroup": str(CGROUP) if provisioner_leftovers.own_cgroup() else None,
            "facts": self._facts,
            "cwd": str(self._cwd),
            "began": time.time(),
        }

    def process(self, stdin: BinaryIO, stdout: BinaryIO, stderr: BinaryIO) -> Process | None:
        """Return a new process with these streams; None if no warm interpreter is like a fresh one."""
        connection = _connect(self._directory)
        if connection is None:
            return None
        connection.settimeout(ANSWER_SECONDS)
        try:
            self._call(connection, (stdin, stdout, stderr))
            message = connection.recv(LONGEST_MESSAGE)
            process = re.fullmatch(rb"process ([1-9][0-9]{0,6})", message)
            if process and 1 < int(process[1]) <= MOST_PROCESSES:
                connection.send(b"go")
                return Process(connection, int(process[1]))
        except OSError:
            message = b""
        if message != b"unfit":  # otherwise it ends itself
            _end(connection, self._directory)
        connection.close()
        return None

    def _call(self, connection: socket.socket, streams: tuple[BinaryIO, ...]) -> None:
        cgroup = provisioner_leftovers.own_cgroup()
        with contextlib.ExitStack() as files:
            facts = files.enter_context(os.fdopen(os.memfd_create("facts"), "wb"))
            facts.write(self._facts.encode("ascii"))
            facts.flush()
            given = [facts, *streams]
            if cgroup is not None:
                given.append(files.enter_context((cgroup / "cgroup.procs").open("wb", buffering=0)))
            numbers = struct.pack(f"{len(given)}i", *(file.fileno() for file in given))
            connection.sendmsg([b"call"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)])


def _opened(directory: Path) -> int:
    """Open the directory of the socket.

    Raises:
        OSError: there is none that only this user can enter.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(descriptor)
        raise PermissionError(f"{directory} must be a directory that only root can enter")
    return descriptor


def _connect(directory: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        descriptor = _opened(directory)
        try:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(f"/proc/self/fd/{descriptor}/{SOCKET}")
        finally:
            os.close(descriptor)
        if _peer(connection)[1] == os.geteuid():
            return connection
    except OSError:
        pass
    connection.close()
    return None


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user that listen at the other side, as the kernel knows them."""
    credentials = struct.Struct("3i")
    pid, user, _ = credentials.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return pid, user


def _end(connection: socket.socket, directory: Path) -> None:
    pid = _peer(connection)[0]
    with contextlib.suppress(OSError):
        (directory / SOCKET).unlink()
    if pid > 1:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _surroundings() -> dict[str, Any]:
    """Return what a process gets from this one without being asked, other than files."""
    status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
    texts = {name: _text(Path("/proc/self") / name) for name in ("limits", "oom_score_adj", "personality", "loginuid")}
    return {
        **texts,
        "status": sorted(line for line in status if line.partition(":")[0] in INHERITED),
        "namespaces": sorted(os.readlink(path) for path in Path("/proc/self/ns").iterdir()),
        "root": os.readlink("/proc/self/root"),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "scheduler": os.sched_getscheduler(0),
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
