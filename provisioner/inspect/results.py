"""Translates the ends of our calls into what Inspect expects of a sandbox. Pure.

Source: inspect_ai.util.SandboxEnvironment, and its self_check.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from inspect_ai.util import ExecResult, OutputLimitExceededError, SandboxEnvironmentLimits

from provisioner.errors import CommandTimeoutError
from provisioner.ssh.exchange import CANNOT_EXECUTE, Completed
from provisioner.ssh.output_buffer import BoundedBuffer

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
