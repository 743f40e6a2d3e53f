"""Records each call of a machine's exec server: one line of JSON for each, in the environment's logs.

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

from provisioner.clock import now
from provisioner.printable import beginning, encodable
from provisioner.recording.manifest import unsealed
from provisioner.redaction import Redactor

CALLS = "calls.jsonl"
# Calls are the controller's, except under Inspect, where a model decides how many there are.
LIMIT_BYTES = 16 << 20
# The key of the last line of a file that is full.
CUT = "cut_here_at"
ARGUMENTS = 32
ARGUMENT_CHARACTERS = 1000


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
        limit_bytes: how long the file may get, however many processes write to it.
    """

    def __init__(
        self,
        directory: Path | None = None,
        machine: str = "",
        redactor: Redactor | None = None,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self._directory = directory
        self._machine = machine
        self._redactor = redactor or Redactor({})
        self._limit_bytes = limit_bytes
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
            last = json.dumps({"at": entry["at"], CUT: f"{self._limit_bytes} bytes"}).encode() + b"\n"
            # Also a call that would fit: what follows on that line would look as if nothing were missing.
            if f'"{CUT}": "'.encode() in os.pread(descriptor, len(last), max(0, size - len(last))):
                return True
            if size + len(line) > self._limit_bytes:
                line = last
            try:
                is_whole = os.write(descriptor, line) == len(line)
            except OSError:  # the disk is full
                is_whole = False
            if not is_whole:
                os.ftruncate(descriptor, size)
            return is_whole
        finally:
            os.close(descriptor)
