"""Runs an agent's command detached from the connection that asked for it, and passes its output on in frames.

The exec server calls `main` in a process that it forks, with a request on stdin. The first call with an id starts the
command under a supervisor, which outlives the connection; any later call follows it from an offset in its output. The
command runs as the agent in a part of the agent's cgroup, which is ended whole when the command has ended or its time
is over. Output goes to files of bounded size, so it neither blocks the agent nor fills the disk.

A frame is a line `KIND OFFSET LENGTH` and LENGTH bytes. KIND is o or e (stdout or stderr from OFFSET), b (a sign of
life), x (the end: JSON) or n (no command has this id).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import select
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
# With -I, Python's path does not include this directory.
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from provisioner_guest.cgroup import outlive_call  # noqa: E402
from provisioner_guest.login import USER_PATH, become, login_environment, protect, restore_signals  # noqa: E402

TYPE_CHECKING = False  # without an import of typing
if TYPE_CHECKING:
    from typing import TypedDict

    class Request(TypedDict):
        """What the controller asks for."""

        root: str
        id: str
        start: bool
        offsets: dict[str, int]
        limit_seconds: float | None
        user: str
        home: str
        command: str


STREAMS = {"o": "stdout", "e": "stderr"}
# How often a follower looks for output: at first, and when there has been none for a while.
QUICK_SECONDS, SLOW_SECONDS = 0.02, 0.4
SIGN_OF_LIFE_SECONDS = 10.0
HEADER_BYTES = 8
CAPACITY_BYTES = 8 << 20
# The most that is written or read at once.
CHUNK_BYTES = 64 << 10
# As many chunks as a pipe can hold (pipe(7), pipe-max-size). Later ones are from a process outside of the agent's
# cgroup, which may never end.
LAST_CHUNKS = 16


class Ring:
    """Keeps the end of a stream in a file of bounded size, which one process writes while others read it.

    The count of all bytes that were ever written comes first.

    Args:
        descriptor: of the file, open for reading, and for writing if `write` is called.
        capacity_bytes: how much of the stream the file holds; more than two chunks.
    """

    def __init__(self, descriptor: int, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self.descriptor = descriptor
        self.capacity_bytes = capacity_bytes

    def total(self) -> int:
        """Returns how many bytes were written since the beginning."""
        return int.from_bytes(os.pread(self.descriptor, HEADER_BYTES, 0), "little")

    def write(self, data: bytes) -> None:
        """Appends a chunk, over the oldest data. The data is written before it is counted.

        Raises:
            OSError: the disk is full.
        """
        total = self.total()
        position = total % self.capacity_bytes
        room = self.capacity_bytes - position
        os.pwrite(self.descriptor, data[:room], HEADER_BYTES + position)
        if data[room:]:
            os.pwrite(self.descriptor, data[room:], HEADER_BYTES)
        os.pwrite(self.descriptor, (total + len(data)).to_bytes(HEADER_BYTES, "little"), 0)

    def read(self, offset: int) -> tuple[int, bytes]:
        """Reads at most a chunk, from an offset in the stream or from the oldest byte that is surely left.

        Returns:
            the offset of the data, and the data; empty if nothing was written since.
        """
        while True:
            offset = max(offset, self._oldest())
            position = offset % self.capacity_bytes
            size = min(CHUNK_BYTES, self.total() - offset, self.capacity_bytes - position)
            if size <= 0:
                return offset, b""
            data = os.pread(self.descriptor, size, HEADER_BYTES + position)
            if offset >= self._oldest():  # the writer has not come round in the meantime
                return offset, data

    def _oldest(self) -> int:
        """Returns the offset of the first byte that the writer does not overwrite just now."""
        return max(0, self.total() + CHUNK_BYTES - self.capacity_bytes)


def main() -> int:
    """Starts the command if the request says so and it has not been started, and follows it to its end."""
    request: Request = json.load(sys.stdin.buffer)  # which the controller wrote
    state = os.path.join(request["root"], "var/lib/provisioner/agents", request["id"])
    if request["start"]:
        try:
            os.makedirs(state, mode=0o700)
        except FileExistsError:
            pass
        else:
            start(request, state)
    if os.path.isdir(state):
        follow(state, request["offsets"])
    else:
        send("n")
    return 0


def start(request: Request, state: str) -> None:
    """Starts the supervisor. It keeps the state's lock as long as it lives."""
    rings = {}
    for name in STREAMS.values():
        descriptor = os.open(os.path.join(state, name), os.O_RDWR | os.O_CREAT, 0o600)
        rings[name] = Ring(descriptor)
    lock = os.open(os.path.join(state, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    told, moved = os.pipe()
    if os.fork():
        os.close(lock)
        os.close(moved)
        os.read(told, 1)  # until it is out of this call's cgroup and process group, with which it would end
        return
    end: dict[str, int | bool | None] = {"exit_code": None, "timed_out": False}
    try:
        os.setsid()
        outlive_call()
        os.close(moved)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        protect("-1000")
        end = supervise(request, rings)
    finally:
        with open(os.path.join(state, "end.new"), "w", encoding="ascii") as file:
            json.dump(end, file)
        os.rename(os.path.join(state, "end.new"), os.path.join(state, "end"))
        os._exit(0)


def supervise(request: Request, rings: dict[str, Ring]) -> dict[str, int | bool | None]:
    """Runs the command to its end or its time limit, keeps its output, and ends what it left.

    Returns:
        timed_out; and exit_code: None if the time ran out, -1 if a signal ended the command, 125 if it could not be
        started, which its stderr then explains.
    """
    pipes = {name: os.pipe() for name in rings}
    child = os.fork()
    if child == 0:
        try:
            become_agent(request, pipes["stdout"][1], pipes["stderr"][1])
        except BaseException as error:
            os.write(pipes["stderr"][1], f"The agent could not be started: {error}\n".encode())
        os._exit(125)
    readers = {}
    for name, (reader, writer) in pipes.items():
        os.close(writer)
        os.set_blocking(reader, False)
        readers[reader] = rings[name]
    timed_out = not collect(child, readers, request["limit_seconds"])
    cgroup(["kill", request["id"]])
    _, status = os.waitpid(child, 0)
    for reader, ring in readers.items():
        for _ in range(LAST_CHUNKS):
            if not copy_chunk(reader, ring):
                break
    code = None if timed_out else max(os.waitstatus_to_exitcode(status), -1)
    return {"exit_code": code, "timed_out": timed_out}


def become_agent(request: Request, stdout: int, stderr: int) -> None:
    """Turns this process into the agent's login shell, in its part of the cgroup."""
    os.setsid()
    # As root, and before anything of the agent's runs.
    if cgroup(["join", request["id"], str(os.getpid())]) != 0:
        raise OSError("its cgroup could not be made")
    protect("0")
    user = pwd.getpwnam(request["user"])
    home = request["home"]
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    become(user)
    os.umask(0o022)
    os.chdir(os.path.join(home, "scaffolding"))
    restore_signals()
    etc = os.path.join(request["root"], "etc")
    environment = login_environment(etc, user.pw_name, home, user.pw_shell, USER_PATH)
    os.execve("/bin/bash", ["bash", "-lc", request["command"]], environment)


def cgroup(arguments: list[str]) -> int:
    """Runs the program that knows the agent's cgroup and returns its exit code."""
    command = ["sh", os.path.join(HERE, "agent_cgroup.sh"), *arguments]
    return os.spawnvpe(os.P_WAIT, "sh", command, {**os.environ, "PATH": os.defpath})


def collect(child: int, readers: dict[int, Ring], limit_seconds: float | None) -> bool:
    """Keeps the command's output until it ends.

    Returns:
        False if it did not end in time.
    """
    deadline = None if limit_seconds is None else time.monotonic() + limit_seconds
    ended = os.pidfd_open(child)
    waiting = [ended, *readers]
    while True:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return False
        ready = select.select(waiting, [], [], left)[0]
        for reader in ready:
            if reader != ended and not copy_chunk(reader, readers[reader]):
                waiting.remove(reader)  # closed, though the command may still run
        if ended in ready:
            return True


def copy_chunk(reader: int, ring: Ring) -> bool:
    """Keeps a chunk of output and returns whether there may be more."""
    try:
        data = os.read(reader, CHUNK_BYTES)
    except BlockingIOError:
        return False
    with contextlib.suppress(OSError):  # a full disk is no reason to block the agent
        ring.write(data)
    return bool(data)


def follow(state: str, offsets: dict[str, int]) -> None:
    """Passes on the output from the offsets on, and how the command ended."""
    rings = {kind: Ring(os.open(os.path.join(state, name), os.O_RDONLY)) for kind, name in STREAMS.items()}
    pause, told_at = QUICK_SECONDS, time.monotonic()
    while True:
        end = read_end(state)  # before the output is read, so that all of it is
        moved = False
        for kind, ring in rings.items():
            while True:
                offset, data = ring.read(offsets[kind])
                if not data:
                    break
                send(kind, offset, data)
                offsets[kind] = offset + len(data)
                moved = True
        if end is not None:
            send("x", 0, end)
            return
        if moved:
            pause, told_at = QUICK_SECONDS, time.monotonic()
        elif time.monotonic() - told_at > SIGN_OF_LIFE_SECONDS:
            send("b")
            told_at = time.monotonic()
        time.sleep(pause)
        pause = min(pause * 2, SLOW_SECONDS)


def read_end(state: str) -> bytes | None:
    """Returns the end's JSON; None while the supervisor lives."""
    lives = False
    lock = os.open(os.path.join(state, "lock"), os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        lives = True
    finally:
        os.close(lock)
    try:
        with open(os.path.join(state, "end"), "rb") as file:
            return file.read()
    except FileNotFoundError:
        if lives:
            return None
    # The supervisor was ended, or the machine started anew.
    return b'{"exit_code": null, "timed_out": false}'


def send(kind: str, offset: int = 0, data: bytes = b"") -> None:
    """Writes a frame to stdout."""
    sys.stdout.buffer.write(f"{kind} {offset} {len(data)}\n".encode() + data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
