"""Writes the result of an operation, or its error, to a file that the controller reads.

The file is separate from the family's output, so no print can corrupt or forge it. Any Python value becomes one that
JSON can represent. NumPy and pandas values are asked for one, without importing either.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import stat
import traceback
import types
from collections.abc import Callable, KeysView, ValuesView
from pathlib import Path, PurePath
from typing import Any

from provisioner_guest.family.request import BadRequestError

MAX_BYTES = 8 * 1024 * 1024
MAX_DEPTH = 60
REPR_LIMIT = 10_000
# Python refuses to format an integer of more than 4,300 digits.
MAX_INTEGER_BITS = 14_000
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
    """Runs an operation and returns its result, whatever it raises.

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
    """Interprets sys.exit's argument as Python does: None is 0, a number is itself, anything else is printed and 1."""
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
    """Leaves out the first frames, up to the family's: our programs', and those of the import of its module.

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
    """Prepares for a result: checks that only root can enter its directory, and removes an earlier result.

    Raises:
        BadRequestError: another user owns the directory or can enter it.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.parent.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise BadRequestError(f"{path.parent} must be a directory that only root can enter")
    discard(path)


def discard(path: Path) -> None:
    """Removes a result, complete or partly written."""
    path.unlink(missing_ok=True)
    _unfinished(path).unlink(missing_ok=True)


def is_written(path: Path) -> bool:
    """Returns whether there is a complete result."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def read(path: Path) -> Any:
    """Returns what `write` wrote in another process; None if it is not there, too large or not JSON.

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
    """Writes a result atomically. Replaces one that is too large by an error."""
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
    """Returns the result for a process that ended without writing one.

    Args:
        exit_code: as subprocess gives it; negative for a signal.
    """
    how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
    return OperationError("exit", f"the operation's process {how} before it wrote a result", exit_code=exit_code).result


class TooLargeError(Exception):
    """The value is larger than a result may be."""

    def __init__(self) -> None:
        super().__init__(f"the returned value is too large: a result holds at most {MAX_BYTES} bytes")


def plain(value: object) -> Any:
    """Converts a value to None, bool, int, float, str, list or dict with string keys.

    NumPy and pandas objects become lists and numbers, a DataFrame a list of rows; NaN and infinities stay.
    Any other value becomes its repr.

    Raises:
        TooLargeError: the value does not fit into a result.
    """
    return _Encoder().encode(value, 0)


def fingerprint(value: object) -> str:
    """Returns a hash that two equal values have in two processes, where sets have another order and objects move."""
    import hashlib  # only here: each import costs the other operations time

    text = json.dumps(_ComparableEncoder().encode(value, 0))
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


class _Encoder:
    """Counts the size of its output, since a small value can expand without end (a list that contains itself twice)."""

    def __init__(self) -> None:
        self._room = MAX_BYTES

    def encode(self, value: object, depth: int) -> Any:
        self._spend(1)
        # A subclass (numpy.float64, an enum) becomes the plain type, without calls of its own methods.
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int.__int__(value) if int.bit_length(value) <= MAX_INTEGER_BITS else "(a very large integer)"
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, str):
            return self._string(str.__str__(value))
        if depth >= MAX_DEPTH:
            # Not its repr: for lists that contain each other many times, repr takes for ever.
            return self._string(f"<{type(value).__name__} nested too deeply>")
        if isinstance(value, type):
            return self._representation(value)
        if isinstance(value, (list, tuple)):
            return [self.encode(item, depth + 1) for item in value]
        if isinstance(value, dict):
            return self._dict(value, depth)
        return self._converted(value, depth)

    def _dict(self, value: dict[Any, Any], depth: int) -> Any:
        return {self._key(key): self.encode(item, depth + 1) for key, item in value.items()}

    def _converted(self, value: object, depth: int) -> Any:
        """Asks the object for a simpler form of itself, which NumPy, pandas, Decimal and similar types provide."""
        for method, arguments in (("tolist", ()), ("item", ()), ("to_dict", ("records",)), ("__float__", ())):
            convert = getattr(value, method, None)
            if convert is None:
                continue
            try:
                simpler = convert(*arguments)
            except Exception:  # an unrelated method of that name, or a value without such a form
                continue
            if type(simpler) is not type(value):  # numpy.longdouble.item() returns itself
                return self.encode(simpler, depth + 1)
        return self._unconverted(value, depth)

    def _unconverted(self, value: object, depth: int) -> Any:
        return self._representation(value)

    def _key(self, key: object) -> str:
        try:
            text = str(key)
        except Exception:  # raised by the family's __str__
            return self._representation(key)
        return self._string(text)

    def _representation(self, value: object) -> str:
        try:
            text = repr(value)
        except Exception:  # raised by the family's __repr__, or the value is nested too deeply
            text = f"<{type(value).__name__} without a repr>"
        return self._string(text[:REPR_LIMIT])

    def _string(self, text: str) -> str:
        self._spend(len(text))
        return text

    def _spend(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise TooLargeError


class _ComparableEncoder(_Encoder):
    """Sorts sets and dicts, and encodes objects by their fields. Objects of a type without fields are all equal."""

    def _dict(self, value: dict[Any, Any], depth: int) -> Any:
        pairs = [[self.encode(key, depth + 1), self.encode(item, depth + 1)] for key, item in value.items()]
        return {"dict": _sorted(pairs)}

    def _converted(self, value: object, depth: int) -> Any:
        if isinstance(value, (set, frozenset)):
            return {"set": _sorted([self.encode(item, depth + 1) for item in value])}
        return super()._converted(value, depth)

    def _unconverted(self, value: object, depth: int) -> Any:
        import datetime

        if isinstance(value, (bytes, bytearray)):
            return {"bytes": self._string(value.hex())}
        # Their repr is the same in each process, and their fields are not: a path keeps its hash.
        dates = (datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo)
        if isinstance(value, (complex, range, PurePath, re.Pattern, *dates)):
            return self._representation(value)
        if isinstance(value, (KeysView, ValuesView)):
            return _sorted([self.encode(item, depth + 1) for item in value])
        kind = self._string(type(value).__qualname__)
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
        if isinstance(name, str):  # a function, method or module
            return [kind, self._string(name)]
        return [kind, self.encode(_fields(value), depth + 1)]

    def _representation(self, value: object) -> str:
        return re.sub("0x[0-9a-f]+", "0x", super()._representation(value))


def _sorted(encoded: list[Any]) -> list[Any]:
    return sorted(encoded, key=json.dumps)


def _fields(value: object) -> dict[str, Any]:
    """Returns an object's fields: those of its __dict__ and of its classes' __slots__."""
    fields = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                fields[slot] = getattr(value, slot)
    return fields
