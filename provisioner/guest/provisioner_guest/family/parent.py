"""Starts the child that runs an operation, passes its output on, and makes sure that there is a result.

The child's output goes to files, not to pipes. So processes that the task leaves running can keep writing: they neither
block this process nor die of a closed pipe. When an operation's time is over, all processes in its call's cgroup are
ended, whatever sessions they made. A process that a scoring leaves running as agent may be the agent's own program. It
is moved to the agent's cgroup, and so ends before the next scoring.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NoReturn

from provisioner_guest import cgroup
from provisioner_guest.family import results
from provisioner_guest.family.request import Request, User, as_json, family_python
from provisioner_guest.login import ROOT_PATH

POLL_SECONDS, PAUSE_SECONDS = 0.1, 0.02
CHUNK_BYTES = 64 * 1024
# The operations that import no task code.
OWN_OPERATIONS = frozenset({"shell", "settle_home", "read_submission"})
SCORINGS = frozenset({"score", "intermediate_score", "aggregate_scores"})
# The exec server makes one for each call, and no other program uses this name (cgroup.py).
CALL = "/provisioner/call-"
AGENTS = cgroup.AGENTS + "/logins"
CLEARING_SECONDS = 20.0


def run(request: Request, *, program: str) -> None:
    """Runs one operation: passes its output on, and leaves its result in the request's result file.

    Args:
        request: the request.
        program: the path of helper.py.

    Raises:
        BadRequestError: the result's directory is not safe.
    """
    results.prepare(request.result)
    state = request.root / "var/lib/provisioner"
    operations = state / "operations"
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    operations.mkdir(mode=0o700, exist_ok=True)
    directory = Path(tempfile.mkdtemp(dir=operations))  # 0700
    try:
        _run_in(request, program, directory)
    finally:
        # The output may quote secrets, which must not stay in an image. Running processes keep their open files.
        shutil.rmtree(directory, ignore_errors=True)


def _run_in(request: Request, program: str, directory: Path) -> None:
    # For appending: `echo ... > /dev/stderr` reopens and truncates the file, after which other writers must not
    # continue at their old offsets.
    environment = request.login_of(User("root", 0, 0, str(request.home), "/bin/bash"), ROOT_PATH)
    try:
        with (directory / "stdout").open("ab") as stdout, (directory / "stderr").open("ab") as stderr:
            if request.operation in OWN_OPERATIONS:
                child: _Fork | subprocess.Popen[bytes] = _Fork(request, program, environment, (stdout, stderr))
            else:
                command = [*family_python(environment["PATH"]), "-u", program, "child"]
                child = _start(request, command, environment, stdout, stderr)
    except (LookupError, OSError) as error:
        results.write(request.result, results.OperationError("invalid", f"{error}").result)
        return
    with (directory / "stdout").open("rb") as stdout, (directory / "stderr").open("rb") as stderr:
        limit = request.output_limit_bytes
        streams = [_Stream(stdout, sys.stdout.buffer, limit), _Stream(stderr, sys.stderr.buffer, limit)]
        exit_code = _wait(child, streams, request.timeout_seconds)
        _clear(request, in_time=exit_code is not None)
        for stream in streams:
            stream.finish()
    if exit_code is None:
        message = f"it did not end within {request.timeout_seconds:g} seconds; its processes were killed"
        results.discard(request.result)
        results.write(request.result, results.OperationError("timeout", message).result)
    elif not results.is_written(request.result):
        results.write(request.result, results.ended(exit_code))


def _start(
    request: Request, command: list[str], environment: dict[str, str], stdout: BinaryIO, stderr: BinaryIO
) -> subprocess.Popen[bytes]:
    """Starts the child as a program, in its own session. The request stays in memory: never on disk or in arguments.

    Only primary machines do this: Popen's umask needs Python 3.9.
    """
    with os.fdopen(os.memfd_create("request"), "w+b") as stdin:
        stdin.write(as_json(request))
        stdin.flush()
        stdin.seek(0)
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=request.home,
            env=environment,
            start_new_session=True,
            umask=0o022,
        )


def _wait(child: _Fork | subprocess.Popen[bytes], streams: list[_Stream], timeout_seconds: float | None) -> int | None:
    """Passes output on until the child has ended, even if processes that it started still run.

    Returns:
        Its exit code, or None if the time ran out and its process group was killed.
    """
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(timeout=POLL_SECONDS)
        for stream in streams:
            stream.pass_on()
        if deadline is not None and time.monotonic() > deadline:
            for kill in (os.killpg, os.kill):  # a fork may not lead a group yet
                with contextlib.suppress(ProcessLookupError):
                    kill(child.pid, signal.SIGKILL)
            child.wait()
            return None


@dataclass
class _Stream:
    """Passes on a growing file: the first half of the allowed bytes as they arrive, the rest at the end."""

    file: BinaryIO
    target: BinaryIO
    limit_bytes: int
    passed: int = field(default=0, init=False)
    offset: int = field(default=0, init=False)

    def pass_on(self) -> None:
        """Passes on new output, up to half of the allowed bytes."""
        self._copy(min(self._unread(), self.limit_bytes // 2 - self.passed))

    def finish(self) -> None:
        """Passes on the rest, with its middle cut out if it is too long. Later output is ignored."""
        self.pass_on()
        rest, room = self._unread(), self.limit_bytes - self.passed
        if rest > room:
            self._emit(f"\n[... {rest - room} bytes cut out ...]\n".encode())
            self.offset += rest - room
        self._copy(min(rest, room))

    def _unread(self) -> int:
        size = os.fstat(self.file.fileno()).st_size
        if size < self.offset:
            self.offset = 0  # the task truncated its output, so the file's contents are new
        return size - self.offset

    def _copy(self, size: int) -> None:
        while size > 0 and (data := os.pread(self.file.fileno(), min(CHUNK_BYTES, size), self.offset)):
            size -= len(data)
            self.offset += len(data)
            self.passed += len(data)
            self._emit(data)

    def _emit(self, data: bytes) -> None:
        try:
            self.target.write(data)
            self.target.flush()
        except OSError:
            # The reader is gone, but the operation must continue, and this process must exit normally.
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.target.fileno())


class _Fork:
    """The child in a fork of our own Python, which the family cannot change, without an interpreter's start."""

    def __init__(
        self, request: Request, program: str, environment: dict[str, str], output: tuple[BinaryIO, BinaryIO]
    ) -> None:
        directory = os.open(request.home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # what it holds is written once
            self.pid = os.fork()
            if self.pid == 0:
                _run_child(request, program, environment, directory, output)
        finally:
            os.close(directory)

    def wait(self, timeout: float | None = None) -> int:
        """Returns its exit code, -n if signal n ended it, or raises subprocess.TimeoutExpired, as Popen does."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            pid, status = os.waitpid(self.pid, 0 if deadline is None else os.WNOHANG)
            if pid:
                return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork", timeout or 0)
            time.sleep(PAUSE_SECONDS)


def _run_child(
    request: Request, program: str, environment: dict[str, str], directory: int, output: tuple[BinaryIO, BinaryIO]
) -> NoReturn:
    code = 1
    try:
        os.setsid()
        with open(os.devnull, "rb") as empty:
            for number, stream in enumerate((empty, *output)):
                os.dup2(stream.fileno(), number)
        os.fchdir(directory)
        os.umask(0o022)
        os.environ.clear()
        os.environ.update(environment)
        from provisioner_guest.family import child

        child.main(request, program_directory=os.path.dirname(program))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)


def _clear(request: Request, *, in_time: bool) -> None:
    """Ends or moves the processes that an operation has left. Does nothing where calls have no cgroups."""
    call = own_cgroup()
    if call is None:
        return
    if not in_time:
        _repeat(call, lambda _: True, lambda pid: os.kill(pid, signal.SIGKILL))
    elif request.operation in SCORINGS and os.path.isdir(AGENTS):
        try:
            agent = request.user("agent").uid
        except (LookupError, OSError):
            return
        _repeat(call, lambda pid: is_agents(pid, agent), lambda pid: cgroup.write(AGENTS + "/cgroup.procs", str(pid)))


def own_cgroup() -> str | None:
    """Returns the path of this process's cgroup; None if it is not that of a call."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            if line.startswith("0::" + CALL):
                return cgroup.ROOT + line[len("0::") :]
    return None


def is_agents(pid: int, agent: int) -> bool:
    """Returns whether a process has the agent's rights, or is in a user namespace, where it may have other ids.

    Raises:
        OSError: it has ended.
    """
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("Uid:") and str(agent) in line.split():
            return True
    return os.stat(f"/proc/{pid}/ns/user").st_ino != os.stat("/proc/self/ns/user").st_ino


def _repeat(call: str, concerns: Callable[[int], bool], act: Callable[[int], object]) -> None:
    """Applies `act` to every other matching process in the cgroup until none is left or 20 s have passed."""
    if not _concerned(call, concerns):
        return
    deadline = time.monotonic() + CLEARING_SECONDS
    before = cgroup.read(call + "/pids.max")
    cgroup.write(call + "/pids.max", "0")  # nothing starts meanwhile
    try:
        while (left := _concerned(call, concerns)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(OSError):  # it has ended
                    act(pid)
            time.sleep(PAUSE_SECONDS)
    finally:
        cgroup.write(call + "/pids.max", before)


def _concerned(call: str, concerns: Callable[[int], bool]) -> list[int]:
    """Returns the matching processes, and those that ended just now: they may have started others."""
    left = []
    for pid in map(int, cgroup.read(call + "/cgroup.procs").split()):
        try:
            if pid != os.getpid() and concerns(pid):
                left.append(pid)
        except OSError:
            left.append(pid)
    return left
