"""Starts a call's program in a container of the machine's Docker Engine, with the rights that `docker exec` gives it.

runc enters the container, as it does for the engine: from a copy of itself to which nothing inside can write. The
container's root may have replaced each file in it, so no program of it runs before runc has given all rights up, and
its users are read by the engine's rules, but from regular files below its root and in bounded pieces.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import resource
import stat
import struct

from provisioner_guest.exec.start import StartError, exit_code
from provisioner_guest.login import ROOT_PATH

TYPE_CHECKING = False  # without an import of typing, which costs each call time
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from provisioner_guest.cgroup import Cgroup
    from provisioner_guest.exec.start import Request

RUNC = "/usr/sbin/runc"
# Where the engine's runc keeps its containers, and the engine itself.
STATES = "/run/docker/runtime-runc/moby"
ENGINE = "/var/lib/docker/containers"
# Where runc writes the numbers of processes that it has started.
NUMBERS = "/run/provisioner-exec"
# A file of users or groups of a container.
MOST_BYTES = 4 << 20
MOST_ENTRIES = 20000
LOG_BYTES = 64 << 10
HIGHEST_ID = (1 << 31) - 1
# Of Linux: kinds of resource limits, prctl(2) and openat2(2).
LIMITS = 16
PR_SET_CHILD_SUBREAPER = 36
OPENAT2 = 437
RESOLVE_NO_MAGICLINKS, RESOLVE_IN_ROOT = 0x02, 0x10
# The engine sets it for the terminal of a container's first process alone.
TERMINAL = "TERM=xterm"


class Container:
    """A container that runs.

    Args:
        identity: the engine's id of it.
        pid: its first process; 0 for whichever it is.

    Attributes:
        cgroup: the path of its cgroup.

    Raises:
        StartError: it does not run, or was started again and has another first process.
    """

    def __init__(self, identity: str, pid: int) -> None:
        self._identity = identity
        try:
            state = _parsed(os.path.join(STATES, identity, "state.json"))
            [bundle] = [label[7:] for label in state["config"]["labels"] if label.startswith("bundle=")]
            self._config = _parsed(os.path.join(bundle, "config.json"))
        except (OSError, ValueError, KeyError):
            raise self._not_running("it has no state") from None
        self._first = state["init_process_pid"]
        if pid not in (0, self._first):
            raise StartError("container", errno.ESTALE, "")  # the controller says what that means
        self.cgroup: str | None = next(iter(state["cgroup_paths"].values()), None)

    def _not_running(self, why: str) -> StartError:
        return StartError("container", errno.ESRCH, f"the container does not run: {why}")

    def execute(self, request: Request, cgroup: Cgroup, report: int) -> int:
        """Runs the request's program to its end and returns its exit code, 128+n if signal n ended it.

        Args:
            cgroup: of the call, within the container's.
            report: the descriptor to close once the program runs.

        Raises:
            StartError: it cannot be started.
        """
        description, log = os.memfd_create("process"), os.memfd_create("log")
        os.write(description, json.dumps(self.process(request)).encode("ascii"))
        argv = ["runc", "--root", STATES, "--log", f"/proc/self/fd/{log}", "--log-format", "json", "exec"]
        number = os.path.join(NUMBERS, f"process-{os.getpid()}")
        argv += ["--detach", "--process", f"/proc/self/fd/{description}", "--pid-file", number]
        if cgroup.path:
            argv += ["--cgroup", "/" + os.path.basename(cgroup.path)]
        self._take_limits()
        # runc ends once the program runs, which then is a child of this process.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        pid = os.fork()
        if pid == 0:
            for descriptor in (description, log):
                os.set_inheritable(descriptor, True)
            os.execve(RUNC, [*argv, self._identity], {"PATH": ROOT_PATH})
        if os.waitpid(pid, 0)[1]:
            raise self._failure(os.pread(log, LOG_BYTES, 0), request["argv"][0])
        os.close(report)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # the program's alone
            os.dup2(null, stream)
        with open(number, encoding="ascii") as file:
            pid = int(file.read())
        os.unlink(number)
        # Not whatever ends first: in the machine's own pid namespace, what is left behind comes to this process.
        return exit_code(os.waitpid(pid, 0)[1])

    def process(self, request: Request) -> dict[str, Any]:
        """Returns the description of the request's process: the container's first one's, changed as by the engine.

        Raises:
            StartError: the container has no such user.
        """
        process = dict(self._config["process"])
        given = [each for each in process["env"] if not (process.get("terminal") and each == TERMINAL)]
        variables = dict(each.partition("=")[::2] for each in given)
        variables.update(request["environment"])
        env = [name + "=" + value for name, value in variables.items()]
        process.update(args=request["argv"], env=env, cwd=request["cwd"] or process["cwd"], terminal=False)
        if request["user"]:
            process["user"] = self._user(request["user"])
        return process

    def _user(self, text: str) -> dict[str, int | list[int]]:
        root = self._config["root"]["path"]
        try:
            passwd, group = (_entries(root, path) for path in ("etc/passwd", "etc/group"))
            added = _parsed(os.path.join(ENGINE, self._identity, "hostconfig.json")).get("GroupAdd") or ()
            return user(text, passwd, group, added)
        except (LookupError, OSError, ValueError) as error:
            raise StartError("user", errno.ENOENT, f"unable to find user {text}: {error}") from None

    def _take_limits(self) -> None:
        """Takes the resource limits of the process above the container's first one, which the engine's calls have."""
        with open(f"/proc/{self._first}/stat", encoding="ascii", errors="replace") as file:
            above = int(file.read().rpartition(")")[2].split()[1])
        for number in range(LIMITS):
            with contextlib.suppress(ValueError):  # beyond what this kernel allows now, if it was changed
                resource.setrlimit(number, resource.prlimit(above, number))

    def _failure(self, log: bytes, program: str) -> StartError:
        words = "runc failed"
        for line in log.decode("utf-8", errors="replace").splitlines():
            try:
                words = json.loads(line)["msg"]
            except (ValueError, KeyError, TypeError):
                continue
        if not os.path.exists(f"/proc/{self._first}") or words.endswith("in a stopped container"):
            return self._not_running(words)
        _, found, cause = words.partition(f'exec: "{program}": ')
        if not found:
            return StartError("process", errno.EIO, words)
        denied = cause.endswith("permission denied")
        return StartError("program", errno.EACCES if denied else errno.ENOENT, found + cause)


def user(
    text: str, passwd: list[list[str]], group: list[list[str]], added: Iterable[str | int] = ()
) -> dict[str, int | list[int]]:
    """Returns the user of a process as runc is told it, by the engine's rules.

    Args:
        text: USER or USER:GROUP, each a name or a number; a number wins over a name.
        passwd, group: the entries of the container's files.
        added: names or numbers of further groups.

    Raises:
        LookupError: there is no such user or group.
    """
    name, _, group_name = text.partition(":")
    entry = _entry(name or "0", passwd, 2)
    uid, gid = _number(entry[2]), _number(entry[3])
    groups = []
    if group_name:
        gid = _number(_entry(group_name, group, 2)[2])
    elif entry[0]:
        groups = [_number(each[2]) for each in group if entry[0] in each[3].split(",")]
    groups += [_number(_entry(str(each), group, 2)[2]) for each in added]
    if not all(0 <= number <= HIGHEST_ID for number in (uid, gid, *groups)):
        raise LookupError("its number is out of range")
    return {"uid": uid, "gid": gid, "additionalGids": [gid, *groups]}


def _entry(text: str, entries: list[list[str]], place: int) -> list[str]:
    """Returns the first entry with a name, or with a number; a number needs no entry."""
    is_number = re.fullmatch(r"[+-]?[0-9]{1,18}", text, re.ASCII)
    for entry in entries:
        if _number(entry[place]) == int(text) if is_number else entry[0] == text:
            return entry
    if not is_number:
        raise LookupError("no matching entries in the container's files")
    return ["", "", text, "0"]


def _number(text: str) -> int:
    """Returns a number of the container's files; what is none counts as 0, as for the engine."""
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text, re.ASCII) else 0


def _entries(root: str, path: str) -> list[list[str]]:
    """Returns the entries of a file of users or groups below a container's root; none if it is not there.

    Raises:
        OSError: it is no regular file, or too long.
    """
    try:
        file = _found_inside(root, path)
    except FileNotFoundError:
        return []
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):  # to open a device may already do something
            raise OSError(errno.EINVAL, "/" + path + " is no regular file")
        with open(f"/proc/self/fd/{file}", "rb") as opened:
            data = opened.read(MOST_BYTES + 1)
    finally:
        os.close(file)
    if len(data) > MOST_BYTES:
        raise OSError(errno.EFBIG, "/" + path + " is too long")
    lines = data.decode("utf-8", errors="surrogateescape").split("\n", MOST_ENTRIES)
    if len(lines) > MOST_ENTRIES:  # as lists, empty ones would take a hundred times the file
        raise OSError(errno.EFBIG, "/" + path + " has too many entries")
    return [[*line.strip().split(":", 7), "", "", "", ""] for line in lines if line.strip()]


def _found_inside(root: str, path: str) -> int:
    """Returns a descriptor that names a file without opening it; links lead nowhere outside of a root (openat2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    directory = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        how = struct.pack("QQQ", os.O_PATH | os.O_CLOEXEC, 0, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
        file: int = libc.syscall(OPENAT2, directory, os.fsencode(path), how, len(how))
    finally:
        os.close(directory)
    if file < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()) + ": /" + path)
    return file


def _parsed(path: str) -> Any:
    """Returns what a file of the engine's says.

    Raises:
        OSError, ValueError: it is not there, or no JSON.
    """
    with open(path, encoding="utf-8") as file:
        return json.load(file)
