"""Runs an operation that imports no task code in a fork of this process, without an interpreter's start."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

PAUSE_SECONDS = 0.02


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
            time.sleep(PAUSE_SECONDS)


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
