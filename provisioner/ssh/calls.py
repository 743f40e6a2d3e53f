"""Makes the calls of a machine's exec server, whatever carries them: commands, files read and written.

The machine is not trusted: whatever it does, each call here ends in time and in little memory. The content of output is
checked elsewhere. Knows neither tasks nor paramiko.
"""

from __future__ import annotations

import contextlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, ClassVar, ParamSpec, Self

from provisioner.base.clock import overdue
from provisioner.base.errors import CommandTimeoutError, MachineLostError, NotStartedError, ProvisionerError, TaskError
from provisioner.base.validation import shown
from provisioner.recording.calls import Call, CallLog
from provisioner.ssh import exec_frames
from provisioner.ssh.exchange import (
    OUTPUT_LIMIT_BYTES,
    Channel,
    Completed,
    Deadline,
    InputFeeder,
    LiveInput,
    OutputCollector,
    exchange,
    size_bytes,
    transfer_seconds,
)
from provisioner.ssh.exec_frames import ExecViolation

# The exec server's, in each machine.
SOCKET = "/run/provisioner-exec/socket"
# What our own side does in a moment: copies of a few bytes, a result read, a file of some megabytes written.
SMALL_CALL_SECONDS = 120.0
# A command that has not ended although its time is over is cut off with its connection after this time.
CUT_OFF_SECONDS = 10.0

Arguments = ParamSpec("Arguments")


class NoServerError(Exception):
    """The machine has an exec server, and it does not run any more."""


class CallersErrors:
    """Remembers exceptions from a caller's own functions, as some look like a broken connection: BrokenPipeError does.

    Attributes:
        raised: the last exception.
    """

    def __init__(self) -> None:
        self.raised: BaseException | None = None

    def watched(self, function: Callable[Arguments, None]) -> Callable[Arguments, None]:
        """Returns the function with its exceptions recorded."""

        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
            try:
                function(*args, **kwargs)
            except BaseException as error:
                self.raised = error
                raise

        return call


class Calls(ABC):
    """Makes calls of one machine's exec server. Use as a context manager.

    Args:
        where: the machine's address, for messages.
        calls: records what the machine is told to do; None records nothing.
        check: called whenever a call waits; an exception that it raises ends the call.
    """

    # What is raised while a call is carried out if the connection breaks.
    _broken_by: ClassVar[tuple[type[Exception], ...]] = (EOFError, ConnectionError)

    def __init__(self, where: str, calls: CallLog | None, check: Callable[[], None]) -> None:
        self._where = where
        self._calls = calls or CallLog()
        self._check = check

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    @abstractmethod
    def active(self) -> bool:
        """Whether the connection has not broken, as far as is known here."""

    @abstractmethod
    def close(self) -> None:
        """Ends the calls, and whatever waits for them. Safe to repeat, and never waits for the machine."""

    @property
    @abstractmethod
    def _answer_seconds(self) -> float:
        """For each answer of sshd itself, such as to the start of a call."""

    @abstractmethod
    def _open_call(self, check_in_time: Callable[[], None]) -> tuple[Channel, bytes]:
        """Opens a channel for one call; returns it, and what to send on it before the request.

        Args:
            check_in_time: called before each attempt; raises to end the wait for a server that is being started again.

        Raises:
            NoServerError: its server has ended for good.
            Exception: the connection broke, sshd does not answer in time, or `check_in_time` raised it.
        """

    def _close_call(self, channel: Channel) -> None:
        """Closes a call's channel. Output may arrive at the same moment."""
        channel.close()

    def _lost(self) -> ProvisionerError:
        """Returns the error for a connection that broke."""
        return MachineLostError(f"The connection to the machine at {self._where} broke.")

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
        program: str | None = None,
        container: tuple[str, int] | None = None,
        stdin: bytes | IO[bytes] | LiveInput = b"",
        on_stdout: Callable[[bytes], None] | None = None,
        on_stderr: Callable[[bytes], None] | None = None,
        timeout_seconds: float | None = SMALL_CALL_SECONDS,
        limit_bytes: int = OUTPUT_LIMIT_BYTES,
        part: str = "",
    ) -> Completed:
        """Runs a command and waits for its end, but not for processes that it left in the background.

        Args:
            argv: the command and its arguments. No shell reads them.
            user: the user that runs it, with the environment of a login.
            cwd: the directory; None for the user's home.
            environment: further variables. No process list shows them.
            program: Python text, which runs in a process that the exec server forks, with `argv` as its sys.argv.
            container: the machine's container in which the command runs, with the rights that `docker exec` gives it:
                the engine's id of it, and its first process. An empty `user` and no `cwd` are then the container's.
            stdin: the command's whole input.
            on_stdout, on_stderr: called with each piece of output as it arrives.
            timeout_seconds: when the command must have ended, at the latest. None waits for as long as it takes, which
                is for commands that an operator watches, or that may last until the machine's end.
            limit_bytes: how much of each stream is kept; the middle of a longer one is cut out.
            part: what it is for, in the record of calls.

        Raises:
            MachineLostError: the connection broke, or the machine's exec server ended or fell silent.
            CommandTimeoutError: the command did not end in time. The channel is closed, by which the machine ends all
                processes of the command; if the machine lets even that wait, the connection is cut off. A command that
                was not even started is a NotStartedError.
            TaskError: the machine's sshd or exec server sent what no honest one sends; the connection is closed.
            Exception: a listener or the connection's check raised it. The channel is closed as well.
        """
        operation, more = ("execute", {}) if program is None else ("interpret", {"program": program})
        identity, pid = container or ("", 0)
        request = exec_frames.request(
            operation, user=user, argv=argv, cwd=cwd, environment=environment, timeout_seconds=timeout_seconds,
            container=identity, container_pid=pid, **more,
        )  # fmt: skip
        call = Call(operation, user, argv, part, identity)
        return self._call(call, argv[0], request, stdin, on_stdout, on_stderr, timeout_seconds, limit_bytes)

    def read_file(
        self,
        path: str,
        limit_bytes: int,
        *,
        user: str = "root",
        remove: bool = False,
        timeout_seconds: float | None = None,
    ) -> bytes:
        """Returns a regular file's contents.

        Args:
            remove: whether the file is removed afterwards.
            timeout_seconds: when it must have been read; None for a time that fits `limit_bytes`.

        Raises:
            OSError: with the errno of the user's attempt in the machine: ENOENT, EACCES, EISDIR; EFBIG if the file has
                more than `limit_bytes`.
            MachineLostError, CommandTimeoutError, TaskError: as for run.
        """
        contents = bytearray()  # not the pieces: a machine could send one for every byte
        left = limit_bytes + exec_frames.DATA_LIMIT_BYTES

        def receive(data: bytes) -> None:
            nonlocal left
            left -= len(data)
            if left < 0:
                raise TaskError(f"The machine sent more of {shown(path)} than it was asked for.")
            contents.extend(data)

        request = exec_frames.request("read", user=user, path=path, limit_bytes=limit_bytes, remove=remove)
        seconds = timeout_seconds or SMALL_CALL_SECONDS + transfer_seconds(limit_bytes)
        call = Call("read", user, [path])
        done = self._call(call, f"Reading {path}", request, b"", receive, None, seconds, 0)
        _require_file(done, path)
        return bytes(contents)

    def write_file(self, path: str, data: bytes | IO[bytes], *, user: str = "root", mode: int = 0o644) -> None:
        """Writes a file, and makes its directories.

        Args:
            mode: its permissions if it is new.

        Raises:
            OSError: with the errno of the user's attempt in the machine.
            MachineLostError, CommandTimeoutError, TaskError: as for run.
        """
        request = exec_frames.request("write", user=user, path=path, mode=mode)
        seconds = SMALL_CALL_SECONDS + transfer_seconds(size_bytes(data))
        call = Call("write", user, [path])
        _require_file(self._call(call, f"Writing {path}", request, data, None, None, seconds, 0), path)

    def _call(
        self,
        call: Call,
        what: str,
        request: bytes,
        stdin: bytes | IO[bytes] | LiveInput,
        on_stdout: Callable[[bytes], None] | None,
        on_stderr: Callable[[bytes], None] | None,
        timeout_seconds: float | None,
        limit_bytes: int,
    ) -> Completed:
        """Makes one call of the machine's exec server, from its request to its end."""
        deadline = Deadline(what, timeout_seconds)
        source = io.BytesIO(stdin) if isinstance(stdin, bytes) else stdin
        callers = CallersErrors()
        in_time = (
            contextlib.nullcontext()
            if timeout_seconds is None
            else overdue(timeout_seconds + CUT_OFF_SECONDS, self.close)
        )
        listeners = (on_stdout and callers.watched(on_stdout), on_stderr and callers.watched(on_stderr))
        recorded = self._calls.recorded(call)
        with recorded, in_time, self._channel(what, callers, deadline) as (channel, preamble):
            feeder = InputFeeder(channel, preamble + request, source, call.bytes)
            collector = OutputCollector(limit_bytes, *listeners, call.bytes)
            check = callers.watched(self._check)
            done = exchange(channel, feeder, collector, deadline, lambda: self.active, check)
            call.exit_code = done.exit_code
            return done

    @contextlib.contextmanager
    def _channel(self, what: str, callers: CallersErrors, deadline: Deadline) -> Iterator[tuple[Channel, bytes]]:
        start = Deadline("The start", self._answer_seconds)
        check = callers.watched(self._check)

        def check_in_time() -> None:
            check()
            deadline.require()

        try:
            with overdue(2 * self._answer_seconds, self.close):
                channel, preamble = self._open_call(check_in_time)
        except NoServerError as error:
            raise MachineLostError(f"The machine at {self._where}: {error}") from error
        except Exception as error:  # paramiko raises whatever the machine's bytes made it stumble over
            if error is callers.raised:
                raise
            if isinstance(error, CommandTimeoutError) or start.is_over:
                raise NotStartedError(
                    f"The machine at {self._where} does not answer: it did not start {what}."
                ) from error
            raise self._lost() from error
        try:
            yield channel, preamble
        except ExecViolation as error:
            self.close()
            raise refused(self._where, "exec server", error) from error
        except self._broken_by as error:
            if error is callers.raised:
                raise
            deadline.require()
            raise self._lost() from error
        finally:
            with overdue(CUT_OFF_SECONDS, self.close), contextlib.suppress(*self._broken_by, OSError):
                self._close_call(channel)


def refused(where: str, program: str, violation: Exception) -> TaskError:
    """Returns the error for a machine whose sshd or exec server breaks its rules."""
    rules = "SSH" if program == "sshd" else "its protocol"
    return TaskError(
        f"The {program} of the machine at {where} breaks the rules of {rules}: {violation}.",
        hint=f"No honest {program} does that: another program has taken its place.",
    )


def _require_file(done: Completed, path: str) -> None:
    """Raises what kept a machine from reading or writing a file: its errno is the exit code."""
    if number := done.errno or done.exit_code:
        raise OSError(number, os.strerror(number), path)
