"""Records each call of a machine's exec server: one line of JSON for each, in the environment's logs; and reads them.

Neither what a call is given on stdin nor its variables are recorded: secrets travel there. A line that cannot be
written is counted, and stops nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from provisioner.base import strict_json
from provisioner.base.clock import now
from provisioner.base.printable import beginning, encodable
from provisioner.base.redaction import Redactor
from provisioner.recording.manifest import unsealed

CALLS = "calls.jsonl"
# However many processes write. Calls are the controller's, except under Inspect, where a model decides how many.
LIMIT_BYTES = 16 << 20
# The key of the last line of a file that is full.
CUT = "cut_here_at"
ARGUMENTS = 32
ARGUMENT_CHARACTERS = 1000
# No recorded line is longer, or has more values.
LINE_BYTES = 1 << 20
LINE_VALUES = 1000


@dataclass
class Call:
    """A call that is being made.

    Args:
        operation: what the exec server is asked for: execute, interpret, read or write.
        part: what it is for: the family's operation, or `agent`; empty for anything else.
        argv: the command, or the path that is read or written.
        container: in which container of the machine's; empty for the machine.
        bytes: how many went in and came out so far, by stream: stdin, stdout, stderr.
        exit_code: None if it did not end by itself.
    """

    operation: str
    user: str
    argv: Sequence[str]
    part: str = ""
    container: str = ""
    bytes: Counter[str] = field(default_factory=Counter)
    exit_code: int | None = None


class CallLog:
    """Records the calls of one machine.

    Args:
        directory: the environment's logs; None records nothing.
        machine: the machine's role.
        redactor: removes the secrets.
    """

    def __init__(self, directory: Path | None = None, machine: str = "", redactor: Redactor | None = None) -> None:
        self._directory = directory
        self._machine = machine
        self._redactor = redactor or Redactor({})
        self._lost = 0

    @contextlib.contextmanager
    def recorded(self, call: Call) -> Iterator[Call]:
        """Records a call, which lasts as long as the context, whatever ends it."""
        begun_at, begin = now(), time.monotonic()
        problem = ""
        try:
            yield call
        except BaseException as error:
            problem = type(error).__name__
            raise
        finally:
            if self._directory:
                with contextlib.suppress(Exception):  # whatever it is, the call counts
                    self._write(self._directory, self._described(call, begun_at, time.monotonic() - begin, problem))

    def _described(self, call: Call, begun_at: datetime, seconds: float, problem: str) -> dict[str, object]:
        argv = [self._bounded(word) for word in call.argv[:ARGUMENTS]]
        left_out = len(call.argv) - len(argv)
        return {
            "at": begun_at.isoformat(),
            "machine": self._machine,
            "part": call.part,
            "operation": call.operation,
            "user": self._bounded(call.user),
            **({"container": call.container} if call.container else {}),
            "argv": argv,
            **({"arguments_left_out": left_out} if left_out else {}),
            "exit_code": call.exit_code,
            **({"error": problem} if problem else {}),
            "seconds": round(seconds, 3),
            "bytes": {stream: call.bytes[stream] for stream in ("stdin", "stdout", "stderr")},
        }

    def _bounded(self, word: str) -> str:
        """Redacts and cuts, in this order: a cut could leave half of a secret."""
        return encodable(beginning(self._redactor.redact(word), ARGUMENT_CHARACTERS))

    def _write(self, directory: Path, entry: dict[str, object]) -> None:
        if self._lost:
            entry["lost_before"] = self._lost
        self._lost += 1
        with unsealed(directory) as is_open:
            if is_open and self._appended(directory / CALLS, entry):
                self._lost = 0

    def _appended(self, path: Path, entry: dict[str, object]) -> bool:
        """Appends a line, or one that says that no more follow, and returns whether that worked."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # others write there, too
            size = os.lseek(descriptor, 0, os.SEEK_END)
            line = json.dumps(entry).encode() + b"\n"
            last = json.dumps({"at": entry["at"], CUT: f"{LIMIT_BYTES} bytes"}).encode() + b"\n"
            # Also a call that would fit: what follows on that line would look as if nothing were missing.
            if f'"{CUT}": "'.encode() in os.pread(descriptor, len(last), max(0, size - len(last))):
                return True
            if size + len(line) > LIMIT_BYTES:
                line = last
            return append(descriptor, line)
        finally:
            os.close(descriptor)


def append(descriptor: int, line: bytes) -> bool:
    """Appends a line to a file and returns whether that worked; on a full disk, no half of it stays.

    Raises:
        OSError: a half of it may stay.
    """
    size = os.lseek(descriptor, 0, os.SEEK_END)
    with contextlib.suppress(OSError):
        if os.write(descriptor, line) == len(line):
            return True
    os.ftruncate(descriptor, size)
    return False


def lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of an untrusted file, in pieces of at most LINE_BYTES. Follows no link.

    Raises:
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        while line := file.readline(LINE_BYTES):
            yield line


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the recorded calls of a file, which is untrusted.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is no JSON object, or larger than any that is recorded.
    """
    return map(row_of, lines(path))


def row_of(line: bytes) -> dict[str, Any]:
    """Reads a recorded call from its line.

    Raises:
        ValueError: it is no JSON object, or larger than any that is recorded.
    """
    row = strict_json.parse(line, limit_bytes=LINE_BYTES, maximum_values=LINE_VALUES)
    if not isinstance(row, dict):
        raise ValueError("a row is no object")
    return row


def in_words(row: dict[str, Any]) -> str:
    """Describes a recorded call, or the end of a file that is full, in one line; not yet printable."""
    at, argv = str(row.get("at", "")), row.get("argv")
    if not isinstance(argv, list):
        return f"{at}  " + "  ".join(f"{name} {value}" for name, value in row.items() if name != "at")
    ended = row.get("error") or f"exit {row.get('exit_code')}"
    what = " ".join(str(word) for word in (row.get("operation"), row.get("part"), *argv) if word)
    return f"{at}  {row.get('user')}@{row.get('machine')}  {ended}  {row.get('seconds')} s  {what}"
