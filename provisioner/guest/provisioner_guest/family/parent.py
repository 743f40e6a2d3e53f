"""Starts the child that runs an operation, passes its output on, and makes sure that there is a result.

The child's output goes to files, not to pipes. So processes that the task leaves running can keep writing: they neither
block this process nor die of a closed pipe.
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
from typing import BinaryIO

from provisioner_guest.family import leftovers, machine, results
from provisioner_guest.family.request import Request, as_json, family_python

POLL_SECONDS = 0.1
FORK_PAUSE_SECONDS = 0.02
CHUNK_BYTES = 64 * 1024
# The operations that import no task code.
OWN_OPERATIONS = frozenset({"shell", "settle_home", "read_submission"})


def run(request: Request, *, program: str) -> None:
    """Run one operation: pass its output on, and leave its result in the request's result file.

    Args:
        request: the request.
        program: the path of helper.py.

    Raises:
        BadRequestError: the result's directory is not safe.
    """
    results.prepare(request.result)
    operations = request.places.state / "operations"
    request.places.state.mkdir(mode=0o700, parents=True, exist_ok=True)
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
    environment = {**machine.root_environment(request.places), **request.environment}
    try:
        with (directory / "stdout").open("ab") as stdout, (directory / "stderr").open("ab") as stderr:
            if request.operation in OWN_OPERATIONS:
                child: Fork | subprocess.Popen[bytes] = _fork(request, program, environment, stdout, stderr)
            else:
                command = [*family_python(environment["PATH"]), "-u", program, "child"]
                child = _start(request, command, environment, stdout, stderr)
    except (LookupError, OSError) as error:
        result = results.OperationError("invalid", f"{error}").result
        results.write(request.result, result)
        return
    with (directory / "stdout").open("rb") as stdout, (directory / "stderr").open("rb") as stderr:
        limit = request.output_limit_bytes
        streams = [_Stream(stdout, sys.stdout.buffer, limit), _Stream(stderr, sys.stderr.buffer, limit)]
        exit_code = _wait(child, streams, request.timeout_seconds)
        leftovers.clear(request.operation, _agent(request), in_time=exit_code is not None)
        for stream in streams:
            stream.finish()
    _complete_result(request, exit_code)


def _agent(request: Request) -> int | None:
    """Return the agent's user id; None if the machine has no such user."""
    try:
        return machine.find_user(request.places, "agent").uid
    except (LookupError, OSError):
        return None


def _fork(request: Request, program: str, environment: dict[str, str], stdout: BinaryIO, stderr: BinaryIO) -> Fork:
    """Start the child in our own Python, which the family cannot change."""

    def work() -> None:
        from provisioner_guest.family import child

        child.main(request, program_directory=os.path.dirname(program))

    return Fork(work, environment, request.places.family, stdout, stderr)


def _start(
    request: Request, command: list[str], environment: dict[str, str], stdout: BinaryIO, stderr: BinaryIO
) -> subprocess.Popen[bytes]:
    """Start the child as a program, in its own session. The request stays in memory: never on disk or in arguments.

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
            cwd=request.places.family,
            env=environment,
            start_new_session=True,
            umask=0o022,
        )


def _wait(child: Fork | subprocess.Popen[bytes], streams: list[_Stream], timeout_seconds: float | None) -> int | None:
    """Pass output on until the child has ended, even if processes that it started still run.

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


def _complete_result(request: Request, exit_code: int | None) -> None:
    """Write a result for a child that ended without one."""
    if exit_code is None:
        message = f"it did not end within {request.timeout_seconds:g} seconds; its processes were killed"
        results.discard(request.result)
        results.write(request.result, results.OperationError("timeout", message).result)
    elif not results.is_written(request.result):
        results.write(request.result, results.ended(exit_code))


@dataclass
class _Stream:
    """Passes on a growing file: the first half of the allowed bytes as they arrive, the rest at the end."""

    file: BinaryIO
    target: BinaryIO
    limit_bytes: int
    passed: int = field(default=0, init=False)
    offset: int = field(default=0, init=False)

    def pass_on(self) -> None:
        """Pass on new output, up to half of the allowed bytes."""
        self._copy(min(self._unread(), self.limit_bytes // 2 - self.passed))

    def finish(self) -> None:
        """Pass on the rest, with its middle cut out if it is too long. Later output is ignored."""
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


class Fork:
    """A child process, in its own session, that calls a function and ends.

    Args:
        work: the function.
        environment: all of its variables.
        cwd: its directory.
        stdout, stderr: its output. Its stdin is empty.

    Attributes:
        pid: its id.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, work: Callable[[], None], environment: dict[str, str], cwd: Path, stdout: BinaryIO, stderr: BinaryIO
    ) -> None:
        directory = os.open(cwd, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # what it holds is written once
            self.pid = os.fork()
            if self.pid == 0:
                _become(environment, directory, (stdout.fileno(), stderr.fileno()))
                _end(work)
        finally:
            os.close(directory)

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code, -n if signal n ended it.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            pid, status = os.waitpid(self.pid, 0 if deadline is None else os.WNOHANG)
            if pid:
                return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork", timeout or 0)
            time.sleep(FORK_PAUSE_SECONDS)


def _become(environment: dict[str, str], directory: int, output: tuple[int, int]) -> None:
    try:
        os.setsid()
        empty = os.open(os.devnull, os.O_RDONLY)
        for number, descriptor in enumerate((empty, *output)):
            os.dup2(descriptor, number)
        os.close(empty)
        os.fchdir(directory)
        os.umask(0o022)
        os.environ.clear()
        os.environ.update(environment)
    except BaseException:
        os._exit(1)


def _end(work: Callable[[], None]) -> None:
    code = 0
    try:
        work()
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)
