"""Writes the result of an operation, or its error, to a file that the controller reads.

The file is separate from the family's output, so no print can corrupt or forge it.
"""

from __future__ import annotations

import importlib
import json
import os
import stat
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from provisioner_guest.family.request import BadRequestError
from provisioner_guest.family.values import MAX_BYTES, TooLargeError, plain

MESSAGE_LIMIT = 10_000
TRACEBACK_LIMIT = 30_000


class OperationError(Exception):
    """An operation failed; `result` is the result to write.

    Args:
        kind: "invalid" (the family or the machine breaks a rule), "exit" (a process ended with a code), "exception",
            "timeout" or "too_large".
        message: the problem.
        more: additional keys of the result.
    """

    def __init__(self, kind: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.result: dict[str, Any] = {"status": "error", "kind": kind, "message": message[:MESSAGE_LIMIT], **more}


def result_of(work: Callable[[], Any]) -> dict[str, Any]:
    """Run an operation and return its result, whatever it raises.

    Args:
        work: returns the operation's value.
    """
    try:
        return {"status": "ok", "value": plain(work())}
    except OperationError as error:
        return error.result
    except BadRequestError as error:
        return OperationError("invalid", str(error)).result
    except TooLargeError as error:
        return OperationError("too_large", str(error)).result
    except SystemExit as error:
        return _exit_result(error.code)
    except BaseException as error:
        return _exception_result(error)


def _exit_result(code: object) -> dict[str, Any]:
    """Interpret sys.exit's argument as Python does: None is 0, a number is itself, anything else is printed and 1."""
    if code is None or isinstance(code, int):
        number = int(code or 0)
        return OperationError("exit", f"the task's code called sys.exit({number})", exit_code=number).result
    return OperationError("exit", f"the task's code called sys.exit: {_text(code)}", exit_code=1).result


def _exception_result(error: BaseException) -> dict[str, Any]:
    try:
        trace = "".join(traceback.format_exception(type(error), error, _without_ours(error.__traceback__)))
    except Exception:  # the family's exception may fail even while it is formatted
        trace = ""
    if len(trace) > TRACEBACK_LIMIT:
        half = TRACEBACK_LIMIT // 2
        trace = f"{trace[:half]}\n[... {len(trace) - 2 * half} characters cut out ...]\n{trace[-half:]}"
    return OperationError("exception", _text(error), type=type(error).__name__, traceback=trace).result


def _without_ours(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Leave out the first frames, up to the family's: our programs', and those of the import of its module.

    All of them stay if the exception comes from our programs.
    """
    package = os.path.dirname(os.path.dirname(_without_ours.__code__.co_filename)) + os.sep
    frame, ours = trace, False
    while frame:
        path = frame.tb_frame.f_code.co_filename
        ours = path.startswith(package)
        if not ours and not path.startswith("<frozen importlib") and path != importlib.__file__:
            return frame
        frame = frame.tb_next
    return trace if ours else None


def _text(value: object) -> str:
    try:
        return str(value)[:MESSAGE_LIMIT]
    except BaseException:  # raised by the family's __str__
        return "(its text is not available)"


def prepare(path: Path) -> None:
    """Prepare for a result: check that only root can enter its directory, and remove an earlier result.

    Raises:
        BadRequestError: another user owns the directory or can enter it.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.parent.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise BadRequestError(f"{path.parent} must be a directory that only root can enter")
    discard(path)


def discard(path: Path) -> None:
    """Remove a result, complete or partly written."""
    path.unlink(missing_ok=True)
    _unfinished(path).unlink(missing_ok=True)


def is_written(path: Path) -> bool:
    """Return whether there is a complete result."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def read(path: Path) -> Any:
    """Return what `write` wrote in another process; None if it is not there, too large or not JSON.

    The task's code can write to that path, too.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        return json.loads(data) if len(data) <= MAX_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result atomically. Replace one that is too large by an error."""
    data = json.dumps(result).encode("ascii")
    if len(data) > MAX_BYTES:
        data = json.dumps(OperationError("too_large", str(TooLargeError())).result).encode("ascii")
    _unfinished(path).unlink(missing_ok=True)
    descriptor = os.open(_unfinished(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    os.rename(_unfinished(path), path)


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + ".unfinished")


def ended(exit_code: int) -> dict[str, Any]:
    """Return the result for a process that ended without writing one.

    Args:
        exit_code: as subprocess gives it; negative for a signal.
    """
    how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
    return OperationError("exit", f"the operation's process {how} before it wrote a result", exit_code=exit_code).result
