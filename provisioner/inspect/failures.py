"""Turns our failures into what Inspect expects of a sandbox, and into text with all that we know of them.

The sample of a lost machine ends as an error, whatever its tools, agent or solver make of the call that failed.
Inspect's logs keep an error's text, and none of its other fields.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    background,
)
from rich.markup import escape

from provisioner.base.clock import now
from provisioner.base.errors import (
    CommandTimeoutError,
    Interrupted,
    MachineLostError,
    ProvisionerError,
    Setting,
    TaskError,
)
from provisioner.base.printable import beginning, first_and_last_lines, printable, printable_lines
from provisioner.base.redaction import Redactor
from provisioner.inspect.evals import PrerequisiteError
from provisioner.ssh.exchange import CANNOT_EXECUTE, BoundedBuffer, Completed
from provisioner.store.files import write_atomically
from provisioner.store.home import Home


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


# How an eval's user gives what an error is about: the sandbox's configuration has keys, a task of ours arguments.
_SETTINGS: dict[Setting, str] = {
    "budget": "`budget` (-T budget=USD)",
    "cloud": "`cloud` (-T cloud=CLOUD)",
    "env_file": "`env_file` (-T secrets_env_path=FILE)",
    "region": "`region` (or AWS_REGION)",
    "spot": "`spot`",
    "ttl": "`ttl` (-T ttl=TTL)",
}


def hint_of(error: ProvisionerError) -> str:
    """Returns what to do next, with the keys and arguments that it is done by."""
    keys = ", ".join(_SETTINGS[setting] for setting in error.settings)
    return " ".join(filter(None, (error.hint, keys and f"In provisioner.yaml: {keys}.")))


# Of a program's output or a traceback: in a sample's transcript, and where Inspect shows an error.
FIRST_LINES, LAST_LINES = 20, 60
FIRST_SHOWN, LAST_SHOWN = 3, 12
MOST_CHARACTERS = 16_000
# Of the file with all of it.
MOST_KEPT_CHARACTERS = 1 << 20


class _Text(str):
    """Text that stands in logs as it is, and escaped where Inspect prints it: as part of a text with rich's markup."""

    __slots__ = ()

    def __format__(self, form: str) -> str:
        return format(escape(str(self)), form)


class PreparationError(ProvisionerError, PrerequisiteError):
    """An eval cannot begin. Inspect prints its message alone, without a traceback, and ends.

    Args:
        text: what is said, as it stands: Inspect would take `[...]` in a message for rich's markup.
    """

    message: str

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.message = _Text(text)


@contextmanager
def before_samples() -> Iterator[None]:
    """Turns an error into one that Inspect prints as it is. For use before the first sample, whose errors Inspect logs.

    Raises:
        PreparationError: the body raised a ProvisionerError, or this host refuses a file or directory.
    """
    try:
        yield
    except Interrupted:
        raise
    except ProvisionerError as error:
        raise PreparationError(_joined(error.message, hint_of(error))) from None
    except OSError as error:
        if not error.filename:
            raise
        hint = "Look at the permissions and the disk there, or name another home: PROVISIONER_HOME=DIRECTORY."
        raise PreparationError(f"{printable(str(error.filename))}: {error.strerror}.\n{hint}") from None


@contextmanager
def full_message(redactor: Redactor | None = None) -> Iterator[None]:
    """Puts an error's details and hint into its text, without any secret, and raises the like of it.

    The text fits a screen. If the details do not, it names a file with all of it. Inspect shows a traceback of a
    sample's error, which begins here: where the error comes from is in the file, and no help to the operator.

    Args:
        redactor: of the task's secrets; None if there are none yet.

    Raises:
        ProvisionerError: the body raised it.
    """
    redactor = redactor or Redactor({})
    try:
        yield
    except Interrupted:
        raise
    except ProvisionerError as error:
        text = _on_a_screen(error, redactor)
        # Another object, without the traceback. Inspect's log has `message` as well as the text, and a cause's own.
        told = type(error).__new__(type(error), text)
        told.__dict__ |= error.__dict__ | {"message": text, "details": None, "hint": None, "settings": ()}
        raise told from None


def _on_a_screen(error: ProvisionerError, redactor: Redactor) -> str:
    message, details, hint = _parts(error, redactor)
    shown = first_and_last_lines(details, FIRST_SHOWN, LAST_SHOWN)
    parts = [message, shown, hint]
    if shown != details:
        with suppress(OSError):
            origin = printable_lines(redactor.redact("".join(traceback.format_tb(error.__traceback__))))
            parts.append(f"All of it: {_kept(_joined(message, details, hint, origin))}")
    return beginning(_joined(*parts), MOST_CHARACTERS)


def _kept(text: str) -> Path:
    """Writes a text into a file of the home's archive, and returns its path."""
    home = Home.default()
    home.make()
    path = home.archive / f"inspect-{now():%Y%m%dT%H%M%S}-{secrets.token_hex(4)}.log"
    write_atomically(path, f"{beginning(text, MOST_KEPT_CHARACTERS)}\n".encode(errors="replace"))
    return path


def in_full(error: ProvisionerError, redactor: Redactor) -> str:
    """Returns an error's message, details and hint, redacted, bounded and safe for a terminal."""
    message, details, hint = _parts(error, redactor)
    text = _joined(message, first_and_last_lines(details, FIRST_LINES, LAST_LINES), hint)
    return beginning(text, MOST_CHARACTERS)


def _parts(error: ProvisionerError, redactor: Redactor) -> tuple[str, ...]:
    """Returns an error's message, details and hint, redacted and safe for a terminal; "" for what it lacks."""
    texts = (error.message, error.details or "", hint_of(error))
    return tuple(printable_lines(redactor.redact(text).strip()) for text in texts)


def _joined(*parts: str) -> str:
    return "\n".join(part for part in parts if part)
