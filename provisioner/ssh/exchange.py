"""Carries one call of a machine's exec server over an open SSH channel: its input, its output, its end.

Knows neither paramiko nor the user. Output is untrusted: its size is bounded here, its content checked elsewhere.
"""

from __future__ import annotations

import os
import select
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO, Protocol

from provisioner.base.errors import CommandTimeoutError
from provisioner.ssh.exec_frames import STDIN, STDIN_END, Answers, CallEnd, Stream, frame

OUTPUT_LIMIT_BYTES = 8 << 20


@dataclass(frozen=True)
class StreamSize:
    """Says how long a stream of output was.

    Args:
        total_bytes: all that the command wrote.
        cut_bytes: how many of these were not kept; 0 if the output is complete.
    """

    total_bytes: int = 0
    cut_bytes: int = 0


NO_OUTPUT = StreamSize()


class BoundedBuffer:
    """Keeps the beginning and the end of the data that is written to it, and marks the cut between them.

    Args:
        limit_bytes: how many bytes are kept.
        beginning_bytes: how many of them from the beginning; None for half of them.
    """

    def __init__(self, limit_bytes: int = OUTPUT_LIMIT_BYTES, *, beginning_bytes: int | None = None) -> None:
        self._beginning = max(1, limit_bytes // 2) if beginning_bytes is None else beginning_bytes
        self._end = max(1, limit_bytes // 2) if beginning_bytes is None else limit_bytes - beginning_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._cut = self._total = 0

    def write(self, data: bytes) -> None:
        """Appends data."""
        self._total += len(data)
        room = self._beginning - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._end:
            self._trim()

    def _trim(self) -> None:
        surplus = len(self._tail) - self._end
        if surplus > 0:
            self._cut += surplus
            del self._tail[:surplus]

    @property
    def size(self) -> StreamSize:
        """How much was written, and how much of it `value` lacks."""
        self._trim()
        return StreamSize(self._total, self._cut)

    def value(self) -> bytes:
        """Returns the data that was kept."""
        self._trim()
        mark = b"\n[... %d bytes cut out ...]\n" % self._cut if self._cut else b""
        return bytes(self._head) + mark + bytes(self._tail)


SENT_BYTES_AT_ONCE = 1 << 15
RECEIVED_BYTES_AT_ONCE = 1 << 16
# Of what was received at once: as many are passed on one by one, in the order of both streams.
PIECES_AT_ONCE = 64
# How long to wait for output. Only briefly while there is input to send: the machine may take more before it answers.
WAIT_WHILE_SENDING_SECONDS = 0.05
WAIT_SECONDS = 0.5
# The exec server gives a sign of life every ten seconds, if it gets any processor time at all.
SILENCE_SECONDS = 300.0
# Files may take longer than other calls, at this rate.
TRANSFER_BYTES_PER_SECOND = 512 << 10
# Shells' exit codes for a program that cannot be executed, and for one that does not exist.
CANNOT_EXECUTE, NOT_FOUND = 126, 127
PERMISSION_ERRNOS = (1, 8, 13)  # EPERM, ENOEXEC, EACCES

Listener = Callable[[bytes], None]


class Channel(Protocol):
    """Describes an SSH channel to an exec server. paramiko's Channel fits.

    Attributes:
        eof_received: true once the machine has said that nothing more will come.
        closed: true once the channel was closed.
    """

    eof_received: int
    closed: bool

    def fileno(self) -> int:
        """Returns a file descriptor that is readable when something has arrived."""

    def recv_ready(self) -> bool:
        """Returns whether something has arrived."""

    def recv(self, limit_bytes: int, /) -> bytes:
        """Takes a piece of what has arrived; empty at the end."""

    def send_ready(self) -> bool:
        """Returns whether the machine can take input now."""

    def send(self, data: bytes, /) -> int:
        """Sends a piece and returns how many bytes of it were sent.

        Raises:
            OSError: the channel was closed.
        """

    def close(self) -> None:
        """Closes it, by which the machine ends the call."""


class LiveInput(Protocol):
    """Describes input of which more may come later, such as that of a terminal."""

    def read(self, limit_bytes: int, /) -> bytes | None:
        """Takes a piece without waiting: None if there is none yet, empty at the end."""

    def fileno(self) -> int:
        """Returns a file descriptor that is readable when there is a piece."""


@dataclass(frozen=True)
class Completed:
    """Holds a finished command's exit code and its bounded output.

    Args:
        exit_code: 128+n if signal n ended the command; 126 or 127 if it could not be started.
        stdout, stderr: what was kept.
        errno: why it could not be started; None if it was.
        stdout_size, stderr_size: how much the command wrote, and how much of it was cut out.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    errno: int | None = None
    stdout_size: StreamSize = NO_OUTPUT
    stderr_size: StreamSize = NO_OUTPUT


class Deadline:
    """Watches the time by which a command must have ended.

    Args:
        command: the command's name, for the message.
        timeout_seconds: the time from now; None for no deadline.
    """

    def __init__(self, command: str, timeout_seconds: float | None) -> None:
        self._command = command
        self._timeout_seconds = timeout_seconds
        self._begin = time.monotonic()

    def require(self) -> None:
        """Checks that the deadline has not passed.

        Raises:
            CommandTimeoutError: the deadline has passed.
        """
        if self.is_over:
            raise self.passed()

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self._timeout_seconds is not None and time.monotonic() - self._begin > self._timeout_seconds

    def passed(self) -> CommandTimeoutError:
        """Returns the error that says so."""
        limit = "its time" if self._timeout_seconds is None else f"{self._timeout_seconds:g} s"
        return CommandTimeoutError(f"{self._command} did not end within {limit}.")


def transfer_seconds(size: int) -> float:
    """Returns how much longer than another call one with so many bytes may take."""
    return size / TRANSFER_BYTES_PER_SECOND


def size_bytes(data: bytes | IO[bytes]) -> int:
    """Returns how much of some input is left to read."""
    if isinstance(data, bytes):
        return len(data)
    begin = data.tell()
    size = data.seek(0, os.SEEK_END) - begin
    data.seek(begin)
    return size


class InputFeeder:
    """Sends a call's request and its input as fast as the machine takes them, then the input's end.

    Args:
        channel: the call's channel.
        request: what comes before the input.
        source: the command's whole input.
        counts: counts the input's bytes as `stdin`.

    Attributes:
        is_done: whether all has been sent, or the machine takes no more.
    """

    def __init__(self, channel: Channel, request: bytes, source: IO[bytes] | LiveInput, counts: Counter[str]) -> None:
        self._channel = channel
        self._counts = counts
        self._source = source
        self._pending = memoryview(request)
        self._is_read = self.is_done = False
        # The descriptor on which more input may come; None unless all that came before has been sent.
        self.awaited: int | None = None

    def feed(self) -> bool:
        """Sends as much as the machine takes now and returns whether anything was sent.

        A command may end before it has read its input; the rest is then dropped.
        """
        if not self._pending and not self._is_read:
            data = self._source.read(SENT_BYTES_AT_ONCE)
            self.awaited = self._source.fileno() if data is None else None
            if data is None:
                return False
            self._is_read = not data
            self._counts["stdin"] += len(data)
            self._pending = memoryview(frame(STDIN, data) if data else frame(STDIN_END))
        if self.is_done or not self._channel.send_ready():
            return False
        try:
            sent_bytes = self._channel.send(bytes(self._pending[:SENT_BYTES_AT_ONCE]))
        except OSError:  # closed: the answer, or a lost connection, tells why
            self.is_done = True
            return False
        self._pending = self._pending[sent_bytes:]
        self.is_done = self._is_read and not self._pending
        return True


class OutputCollector:
    """Keeps a command's output within a limit and passes on each piece as it arrives.

    Args:
        limit_bytes: how much of each stream is kept; the middle of a longer one is cut out.
        on_stdout, on_stderr: called with each piece.
        counts: counts each stream's bytes.
    """

    def __init__(
        self, limit_bytes: int, on_stdout: Listener | None, on_stderr: Listener | None, counts: Counter[str]
    ) -> None:
        self._counts = counts
        self._buffers = {"stdout": BoundedBuffer(limit_bytes), "stderr": BoundedBuffer(limit_bytes)}
        self._listeners = {"stdout": on_stdout, "stderr": on_stderr}

    def feed(self, stream: str, data: bytes) -> None:
        """Adds a piece of a stream."""
        self._counts[stream] += len(data)
        self._buffers[stream].write(data)
        if listener := self._listeners[stream]:
            listener(data)

    def completed(self, end: CallEnd) -> Completed:
        """Returns the finished command with the output that was kept. Why it could not start is a line of stderr."""
        if end.text:
            self.feed("stderr", f"{end.text}\n".encode())
        code = end.code
        if code is None:
            is_forbidden = end.what == "program" and end.errno in PERMISSION_ERRNOS
            code = CANNOT_EXECUTE if is_forbidden else NOT_FOUND
        stdout, stderr = self._buffers["stdout"], self._buffers["stderr"]
        return Completed(code, stdout.value(), stderr.value(), end.errno, stdout.size, stderr.size)


def _joined(outputs: Iterable[tuple[Stream, bytes]]) -> Iterable[tuple[Stream, bytes]]:
    """Returns what arrived at once. Too many small pieces become one for each stream: listeners take long for each."""
    pieces = list(outputs)
    if len(pieces) <= PIECES_AT_ONCE:
        return pieces
    streams = dict.fromkeys(stream for stream, _ in pieces)
    return [(each, b"".join(output for stream, output in pieces if stream == each)) for each in streams]


def exchange(
    channel: Channel,
    feeder: InputFeeder,
    collector: OutputCollector,
    deadline: Deadline,
    is_connected: Callable[[], bool],
    check: Callable[[], None],
) -> Completed:
    """Sends a call's input and collects its output until it ends. Processes in the background may keep running.

    Args:
        is_connected: returns whether the connection that carries the channel is still up.
        check: called repeatedly; an exception that it raises ends the exchange.

    Raises:
        ConnectionError: the connection broke or the server fell silent before it said how the command ended.
        CommandTimeoutError: the deadline has passed.
        ExecViolation: the machine sent what its exec server never does.
    """
    answers = Answers()
    begun_at = heard_at = time.monotonic()
    while answers.end is None:
        check()
        data = channel.recv(RECEIVED_BYTES_AT_ONCE) if channel.recv_ready() else b""
        if data:
            for stream, output in _joined(answers.feed(data, time.monotonic() - begun_at)):
                collector.feed(stream, output)
            heard_at = time.monotonic()  # a listener may have taken long
        moved = feeder.feed() or data
        if answers.end:
            break
        deadline.require()
        if moved:
            continue
        # In this order: the connection may end after the last answer has arrived.
        is_over = channel.closed or channel.eof_received or not is_connected()
        if is_over and not channel.recv_ready():
            raise ConnectionError("The connection broke.")
        if time.monotonic() - heard_at > SILENCE_SECONDS:
            raise ConnectionError("The machine has fallen silent.")
        _wait(channel, feeder)
    if answers.end.timed_out:
        raise deadline.passed()
    return collector.completed(answers.end)


def _wait(channel: Channel, feeder: InputFeeder) -> None:
    poll = select.poll()  # unlike epoll, it takes plain files
    poll.register(channel.fileno(), select.POLLIN)
    seconds = WAIT_SECONDS
    if feeder.awaited is not None:
        poll.register(feeder.awaited, select.POLLIN)
    elif not feeder.is_done:
        seconds = WAIT_WHILE_SENDING_SECONDS
    poll.poll(1000 * seconds)
