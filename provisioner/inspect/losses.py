"""Translates the ends of our calls into what Inspect expects of a sandbox.

The sample of a lost machine ends as an error, whatever its tools, agent or solver make of the call that failed.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    background,
)

from provisioner.errors import CommandTimeoutError, MachineLostError, TaskError
from provisioner.ssh.exchange import CANNOT_EXECUTE, BoundedBuffer, Completed


class LossError(MachineLostError):
    """A sample's machine is lost: this call in it fails, and so does every later one.

    Args:
        message: how it was noticed, and what the cloud says.
        is_agents_doing: whether a task family's agent lost it. The score at the end decides then, never an error, as
            Inspect may try a sample with an error again.
    """

    def __init__(self, message: str, *, is_agents_doing: bool) -> None:
        super().__init__(message)
        self.is_agents_doing = is_agents_doing


class NotUpError(TaskError):
    """What runs in a sample's machine is not up. The machine is not lost for that.

    Attributes:
        service: which service of a compose file it is; empty if it is none, or several.
    """

    service = ""


def unavailable(loss: LossError, told: str = "") -> SandboxUnavailableError:
    """Returns Inspect's error for a call in a lost machine, and ends the current sample with an error that says why.

    Inspect makes a tool error of an exception that a tool raises for want of a sandbox, and the model continues. What a
    background function of the sample raises ends the sample. The sample continues only if its agent lost the machine.

    Args:
        told: what the model is told; empty for the whole reason.
    """
    if not loss.is_agents_doing:
        _end_sample(loss.message)
    return SandboxUnavailableError(told or loss.message)


def _end_sample(reason: str) -> None:
    async def fail() -> NoReturn:
        raise SandboxUnavailableError(reason)

    # Inspect refuses before the first solver, while it scores, and outside of samples. No tool takes the call's own
    # error there.
    with contextlib.suppress(RuntimeError):
        background(fail)


# The machine failed, and not what a path names.
_FAILURES = (errno.EIO, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
# What the exec server says of a device or a FIFO.
_IRREGULAR = "It is not a regular file"


class Output:
    """Keeps the end of a command's output as it arrives, up to Inspect's limit when the command began.

    A longer stream also has a line that says how much is missing before it. That makes it longer than the limit, so
    Inspect raises OutputLimitExceededError.
    """

    def __init__(self) -> None:
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        self.stdout, self.stderr = (BoundedBuffer(limit, beginning_bytes=0) for _ in range(2))

    def result(self, done: Completed) -> ExecResult[str]:
        """Returns the result of a command that has ended.

        Raises:
            PermissionError: its program may not be executed.
        """
        stdout, stderr = (kept.value().decode(errors="replace") for kept in (self.stdout, self.stderr))
        if done.errno is not None and done.exit_code == CANNOT_EXECUTE:
            raise PermissionError(errno.EACCES, stderr.strip())
        return ExecResult(success=done.exit_code == 0, returncode=done.exit_code, stdout=stdout, stderr=stderr)

    def timed_out(self, seconds: float, said: str) -> TimeoutError:
        """Returns the error for a command that did not end in time, with its output.

        Args:
            said: what there is to say of it.
        """
        error = TimeoutError(f"Command timed out after {seconds:g} seconds. {said}")
        text = b"".join(part for part in (self.stdout.value(), self.stderr.value()) if part).decode(errors="replace")
        error.truncated_output = text  # type: ignore[attr-defined]
        return error


@contextmanager
def file_errors(file: str) -> Iterator[None]:
    """Turns the failure of a read or write into what Inspect expects.

    Raises:
        TimeoutError: the file did not arrive in time.
        FileNotFoundError, PermissionError, IsADirectoryError, OutputLimitExceededError: as file_error.
        OSError: the machine failed.
    """
    try:
        yield
    except CommandTimeoutError as error:
        raise TimeoutError(error.message) from error
    except OSError as error:
        raise file_error(error, file) from error


def file_error(error: OSError, file: str) -> Exception:
    """Returns what Inspect expects for a file that could not be read or written."""
    number = error.errno or errno.EIO
    if number == errno.EFBIG:
        return OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
    if number == errno.EISDIR:
        return IsADirectoryError(errno.EISDIR, "Is a directory", file)
    # OSError's constructor chooses the subclass: FileNotFoundError, PermissionError and others.
    expected = OSError(number, error.strerror or "", file)
    if isinstance(expected, FileNotFoundError | PermissionError) or number in _FAILURES:
        return expected
    # Of a path that a model has chosen. Its tools tell it of no other error, and Inspect would end the sample.
    return PermissionError(number, _IRREGULAR if number == errno.EINVAL else expected.strerror, file)
