"""Runs the driver's helper in a machine: one operation per call, its result as data, its output for the user.

Nothing that comes back is trusted: it is bounded and parsed here; family/setup_data.py and family/scores.py check it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGKILL
from typing import Any

from provisioner.base import strict_json
from provisioner.base.errors import CommandTimeoutError, TaskError
from provisioner.base.printable import LINE_CHARACTERS, beginning, first_and_last_lines
from provisioner.base.redaction import LEFT_OUT, Redactor
from provisioner.base.validation import shown
from provisioner.driver.output_tee import OutputTee
from provisioner.family.build_steps import PIP_STEP
from provisioner.ssh.connection import Connection
from provisioner.ssh.exchange import NO_OUTPUT, OUTPUT_LIMIT_BYTES, Completed, StreamSize

# Runs the helper in a process that the exec server forks.
HELPER = """
import sys
sys.path.insert(0, "/usr/lib/provisioner/guest")
import helper
sys.exit(helper.main([]))
"""
RESULTS = "/run/provisioner"
# More than the helper ever sends. Family code with root may replace the helper, and only this bounds what it sends.
STREAM_LIMIT_BYTES = 2 * OUTPUT_LIMIT_BYTES
# What the helper writes after the first half of OUTPUT_LIMIT_BYTES, in place of what it cuts out.
_CUT_OUT = re.compile(rb"\n\[\.\.\. (\d{1,15}) bytes cut out \.\.\.\]\n")
_CUT_OUT_LIMIT_BYTES = 64
# How much of each stream an answer holds. The log has more.
ANSWER_OUTPUT_BYTES = 1 << 20
# How much longer a result may get when its secrets are replaced by their names.
GROWTH_CHARACTERS = 4 << 20
TIME_LIMITS = (
    "docs/reference/settings.md#time-limits has the limits, docs/authoring/daemons.md how to leave a program running."
)
MISSING_MODULE = (
    f"If pip installs the module, add this step to build_steps.json, with the package's name: {PIP_STEP}. It runs "
    "before the family's module is imported. docs/reference/task-families.md#what-metrs-image-has-besides lists what "
    "only METR's image has."
)
# Enough for a screen, and little enough to be taken apart into lines.
_END_CHARACTERS = 64 << 10
# The helper writes no larger result; family/results.py's MAX_BYTES counts the whole file.
RESULT_LIMIT_BYTES = strict_json.LIMIT_BYTES
# The helper may take this much longer than the operation itself: it starts an interpreter and reads files.
GRACE_SECONDS = 120
# The helper's exit code if the kernel kills it, as when memory is short.
KILLED = 128 + SIGKILL


@dataclass(frozen=True)
class Answer:
    """Holds an operation's result and its output.

    Args:
        result: the helper's JSON result; a description of the failure if there was none, or not a valid one.
        stdout, stderr: without their middle if they are longer than ANSWER_OUTPUT_BYTES, and free of secrets.
        stdout_size, stderr_size: how much the operation wrote, and how much of it was cut out.
    """

    result: object
    stdout: str
    stderr: str
    stdout_size: StreamSize = NO_OUTPUT
    stderr_size: StreamSize = NO_OUTPUT

    def value(self, what: str) -> Any:
        """Returns the result's value.

        Args:
            what: the operation in the operator's words, such as `start()`.

        Raises:
            TaskError: the operation failed; the message says how, the details hold the end of its output.
        """
        result = self.result
        if isinstance(result, dict) and result.get("status") == "ok":
            return result.get("value")
        raise TaskError(f"{what} {failure(result)}", details=self.tail(result), hint=_hint(result))

    def tail(self, result: object = None) -> str:
        """Returns the end of the output, and both ends of the traceback if there is one: about one screen."""
        traceback = str(result.get("traceback") or "") if isinstance(result, dict) else ""
        ends = (text[-_END_CHARACTERS:].splitlines()[-12:] for text in (self.stdout, self.stderr))
        lines = [beginning(line, LINE_CHARACTERS) for end in ends for line in end]
        # It begins in the family, and may end deep in a library.
        return "\n".join([*lines, *first_and_last_lines(traceback, 4, 7).splitlines()])


def failure(result: object) -> str:
    """Says in a few words how an operation failed, from the helper's result. Pure."""
    if not isinstance(result, dict):
        return "gave no result that could be read"
    match result.get("kind"):
        case "exception":
            return f"raised {str(result.get('type'))[:80]}: {beginning(str(result.get('message')), 400)}"
        case "exit":
            code = result.get("exit_code")
            if isinstance(code, int) and code < 0:
                return f"was killed by signal {shown(-code)}"
            return f"exited with code {shown(code)}"
        case "timeout":
            return "did not end in time"
        case _:
            return f"failed: {beginning(str(result.get('message') or 'no reason given'), 400)}"


def _hint(result: object) -> str | None:
    if not isinstance(result, dict):
        return None
    if result.get("kind") == "timeout":
        return TIME_LIMITS
    if result.get("kind") == "exception" and result.get("type") == "ModuleNotFoundError":
        return MISSING_MODULE
    return None


def _error(kind: str, message: str) -> dict[str, str | int]:
    """Returns what the helper returns for an operation that failed."""
    return {"status": "error", "kind": kind, "message": message}


class _HelperStream:
    """Passes on a stream's pieces, raises once they are more than the helper ever sends, and counts them."""

    def __init__(self, operation: str, receive: Callable[[bytes], None]) -> None:
        self._operation = operation
        self._receive = receive
        self._received = 0
        self._middle = b""

    def __call__(self, data: bytes) -> None:
        """Passes a piece on.

        Raises:
            TaskError: the machine sent more output than the helper ever does.
        """
        before_middle = max(0, OUTPUT_LIMIT_BYTES // 2 - self._received)
        self._middle += data[before_middle:][: _CUT_OUT_LIMIT_BYTES - len(self._middle)]
        self._received += len(data)
        if self._received > STREAM_LIMIT_BYTES:
            raise TaskError(
                f"{self._operation}: the machine sent more than {STREAM_LIMIT_BYTES >> 20} MiB of output.",
                hint="The helper in it cuts output at 8 MiB; another program has taken its place.",
            )
        self._receive(data)

    def size(self, received: StreamSize) -> StreamSize:
        """Returns the size of what the operation wrote, from that of what was received.

        The helper sends more than OUTPUT_LIMIT_BYTES only if it cut the middle out, and says in its place how much.
        """
        match = _CUT_OUT.match(self._middle) if self._received > OUTPUT_LIMIT_BYTES else None
        if match is None:
            return received
        more = int(match[1]) - len(match[0])
        return StreamSize(received.total_bytes + more, received.cut_bytes + more)


class _Cleaner:
    """Removes the secrets from the strings of one result: a family's exception may quote them."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._room_characters = GROWTH_CHARACTERS

    def result(self, value: object) -> object:
        """Returns the helper's result without secrets. Its own keys stay: a secret may be as short as one of them."""
        if isinstance(value, dict):
            return {key: self.clean(item) for key, item in value.items()}
        return self.clean(value)

    def clean(self, value: object) -> object:
        """Returns the value without secrets, in the keys of objects too."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list):
            return [self.clean(item) for item in value]
        if isinstance(value, dict):
            return {self._text(str(key)): self.clean(item) for key, item in value.items()}
        return value

    def _text(self, value: str) -> str:
        text = self._redactor.redact(value)
        self._room_characters -= max(0, len(text) - len(value))
        return text if self._room_characters > 0 or text == value else LEFT_OUT


class TaskDriver:
    """Runs the helper in one machine.

    Args:
        connection: root's connection to that machine.
        family: the family's name.
        redactor: removes the secrets from results and output.
        on_output: called with each piece of the operations' output.
        logs: directory for the OPERATION.log files; None writes none.
    """

    def __init__(
        self,
        connection: Connection,
        family: str,
        redactor: Redactor,
        on_output: Callable[[str], None] = lambda _: None,
        logs: Path | None = None,
    ) -> None:
        self._connection = connection
        self._family = family
        self._redactor = redactor
        self._on_output = on_output
        self._logs = logs

    def call(
        self,
        operation: str,
        *,
        task: str | None = None,
        environment: Mapping[str, str] | None = None,
        timeout_seconds: float,
        **request: Any,
    ) -> Answer:
        """Runs one operation of the helper and reads its result.

        Args:
            operation: the name of a helper operation.
            task: the task's name, if the operation concerns one task.
            environment: variables for the family's code. They travel on stdin, so no process list shows them.
            timeout_seconds: the family's code is killed after this time. If the machine does not obey, the controller
                stops waiting two minutes after that.
            request: further fields that the operation needs.

        Raises:
            MachineLostError: the connection broke.
            TaskError: the machine sent more output than the helper ever does.
        """
        result_path = f"{RESULTS}/{secrets.token_hex(16)}.json"
        body = {
            "operation": operation,
            "family": self._family,
            "task": task,
            "environment": dict(environment or {}),
            "result": result_path,
            "output_limit_bytes": OUTPUT_LIMIT_BYTES,
            "timeout_seconds": timeout_seconds,
            **request,
        }
        try:
            completed = self._stream(operation, json.dumps(body).encode(), timeout_seconds)
            result = self._result(result_path, completed.exit_code)
        except CommandTimeoutError as error:
            return Answer(_error("timeout", f"The machine stayed silent: {error.message}"), "", "")
        # A submission is the agent's own text, and is scored as it is.
        shown = result if operation == "read_submission" else _Cleaner(self._redactor).result(result)
        stdout, stderr = (
            self._redactor.redact(data.decode(errors="replace")) for data in (completed.stdout, completed.stderr)
        )
        return Answer(shown, stdout, stderr, completed.stdout_size, completed.stderr_size)

    def _stream(self, operation: str, request: bytes, timeout_seconds: float) -> Completed:
        log = self._logs / f"{operation}.log" if self._logs else None
        with OutputTee(self._redactor, self._on_output, log) as tee:
            stdout, stderr = (_HelperStream(operation, tee.stream()) for _ in range(2))
            done = self._connection.run(
                ["helper.py"],
                program=HELPER,
                stdin=request,
                on_stdout=stdout,
                on_stderr=stderr,
                timeout_seconds=timeout_seconds + GRACE_SECONDS,
                limit_bytes=ANSWER_OUTPUT_BYTES,
                part=operation,
            )
        return replace(done, stdout_size=stdout.size(done.stdout_size), stderr_size=stderr.size(done.stderr_size))

    def _result(self, path: str, exit_code: int) -> object:
        """Reads and removes the result; returns an error in its place if it is not strict JSON."""
        try:
            data = self._connection.read_file(path, RESULT_LIMIT_BYTES, remove=True)
            return strict_json.parse(data, limit_bytes=RESULT_LIMIT_BYTES, constants=True)
        except CommandTimeoutError:
            raise
        except (strict_json.NotStrictJsonError, OSError) as error:
            if exit_code == KILLED:
                return _error("exit", "the helper was killed") | {"exit_code": -SIGKILL}
            ended = f", and the helper ended with exit code {exit_code}" if exit_code else ""
            return _error("invalid", f"its result cannot be read: {error}{ended}")

    def put_file(self, path: str, data: bytes) -> None:
        """Writes a file that only root can read.

        Raises:
            TaskError: the machine did not write it: its disk is full, or its programs were replaced.
        """
        try:
            self._connection.write_file(path, data, mode=0o600)
        except CommandTimeoutError:
            raise
        except OSError as error:
            raise TaskError(f"{path} could not be written in the machine: {error.strerror}.") from error
