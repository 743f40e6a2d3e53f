"""Carries out one command's exchange over an open SSH channel: its input, its output, its end.

Knows neither who is connected nor paramiko. What comes back is bytes of a stranger: bounded here, judged elsewhere.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import IO, Protocol

from provisioner.remote.output_buffer import BoundedBuffer

SENT_BYTES_AT_ONCE = 1 << 15
RECEIVED_BYTES_AT_ONCE = 1 << 16
# How long to wait for output: shortly while there is input to send, whose way may be free before anything comes.
WAIT_WHILE_SENDING_SECONDS = 0.05
WAIT_SECONDS = 0.5
# How long after the exit status the last output may arrive.
LAST_OUTPUT_SECONDS = 0.1
# How long it is taken at most, while a process that the command left in the background goes on writing.
LAST_OUTPUT_MAX_SECONDS = 2.0

Listener = Callable[[bytes], None]


class Channel(Protocol):
    """What an exchange needs of an SSH channel on which a command was started: paramiko's Channel has it.

    Attributes:
        eof_received: true once the machine has said that no more output will come.
        status_event: set once the exit status is there, or the channel was closed.
    """

    eof_received: int
    status_event: Event

    def fileno(self) -> int:
        """Returns a file descriptor that is readable when there is output."""

    def recv_ready(self) -> bool:
        """Says whether a piece of stdout has come in."""

    def recv(self, limit_bytes: int, /) -> bytes:
        """Takes a piece of stdout; empty at its end."""

    def recv_stderr_ready(self) -> bool:
        """Says whether a piece of stderr has come in."""

    def recv_stderr(self, limit_bytes: int, /) -> bytes:
        """Takes a piece of stderr; empty at its end."""

    def send_ready(self) -> bool:
        """Says whether the machine takes input now."""

    def send(self, data: bytes, /) -> int:
        """Sends input, and returns how many bytes of it went.

        Raises:
            OSError: the channel was closed.
        """

    def shutdown_write(self) -> None:
        """Tells the machine that no more input will come."""

    def exit_status_ready(self) -> bool:
        """Says whether the command has ended."""

    def recv_exit_status(self) -> int:
        """Returns the exit code; -1 if there is none: a signal killed the command, or the channel was lost."""


@dataclass(frozen=True)
class Completed:
    """A finished command: its exit code (-1: it was killed by a signal) and its bounded output."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class Deadline:
    """The moment by which a command must have ended.

    Args:
        command: the command's name, for the message.
        timeout_seconds: from now on; None for no deadline.
    """

    def __init__(self, command: str, timeout_seconds: float | None) -> None:
        self._command = command
        self._timeout_seconds = timeout_seconds
        self._begin = time.monotonic()

    def require(self) -> None:
        """Does nothing before the deadline.

        Raises:
            TimeoutError: it has passed.
        """
        if self._timeout_seconds is not None and time.monotonic() - self._begin > self._timeout_seconds:
            raise TimeoutError(f"{self._command} did not end within {self._timeout_seconds:g} s")


class InputFeeder:
    """Sends a command's input as fast as the machine takes it, then says that there is no more.

    Args:
        channel: the command's.
        source: all that the command reads.
    """

    def __init__(self, channel: Channel, source: IO[bytes]) -> None:
        self._channel = channel
        self._source = source
        self._pending = b""
        self.is_done = False

    def feed(self) -> bool:
        """Sends what the machine takes now; says whether anything went.

        A command may end before it has read its input: the rest of it is then dropped.
        """
        if self.is_done:
            return False
        self._pending = self._pending or self._source.read(SENT_BYTES_AT_ONCE)
        if not self._pending:
            self._channel.shutdown_write()
            self.is_done = True
            return False
        if not self._channel.send_ready():
            return False
        try:
            sent_bytes = self._channel.send(self._pending)
        except OSError:  # closed: the exit status, or the connection's end, says why
            self.is_done = True
            return False
        self._pending = self._pending[sent_bytes:]
        return True


class OutputCollector:
    """Keeps a command's output, bounded, and passes each piece on as it comes.

    Args:
        channel: the command's.
        limit_bytes: how much of each stream is kept, its middle cut out.
        on_stdout, on_stderr: told of each piece.
    """

    def __init__(
        self, channel: Channel, limit_bytes: int, on_stdout: Listener | None, on_stderr: Listener | None
    ) -> None:
        self._channel = channel
        self._stdout, self._stderr = BoundedBuffer(limit_bytes), BoundedBuffer(limit_bytes)
        self._on_stdout, self._on_stderr = on_stdout, on_stderr

    def drain(self, goes_on: Callable[[], bool]) -> bool:
        """Takes what has come in; says whether anything had.

        Args:
            goes_on: asked after each piece, as more may come in for ever; ends the draining if false.
        """
        channel, moved = self._channel, False
        while channel.recv_ready() and (data := channel.recv(RECEIVED_BYTES_AT_ONCE)):
            _keep(data, self._stdout, self._on_stdout)
            moved = True
            if not goes_on():
                break
        while channel.recv_stderr_ready() and (data := channel.recv_stderr(RECEIVED_BYTES_AT_ONCE)):
            _keep(data, self._stderr, self._on_stderr)
            moved = True
            if not goes_on():
                break
        return moved

    def wait(self, seconds: float) -> bool:
        """Waits for output; says whether there is any, or the channel was closed."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            return bool(selector.select(seconds))

    def completed(self, exit_code: int) -> Completed:
        """Returns the finished command, with what was kept of its output."""
        return Completed(exit_code, self._stdout.value(), self._stderr.value())


def _keep(data: bytes, buffer: BoundedBuffer, listener: Listener | None) -> None:
    buffer.write(data)
    if listener:
        listener(data)


class Exchange:
    """One command's exchange with the machine, from its start to its end.

    Args:
        channel: the command's.
        feeder: sends its input.
        collector: takes its output.
        deadline: when it must have ended.
        is_connected: asked whether the connection that carries the channel still stands.
        check: asked again and again; what it raises ends the exchange.
    """

    def __init__(
        self,
        channel: Channel,
        feeder: InputFeeder,
        collector: OutputCollector,
        deadline: Deadline,
        is_connected: Callable[[], bool],
        check: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._feeder = feeder
        self._collector = collector
        self._deadline = deadline
        self._is_connected = is_connected
        self._check = check
        self._ended_at: float | None = None

    def finish(self) -> Completed:
        """Feeds and collects until the command ends. What it left in the background may run on.

        Raises:
            ConnectionError: the connection broke before the exit status came.
            TimeoutError: the deadline has passed.
        """
        while not self._advance():
            pass
        self._collector.drain(self._goes_on)
        exit_code = self._channel.recv_exit_status()
        if exit_code == -1 and not self._is_connected():
            raise _broken()
        return self._collector.completed(exit_code)

    def _advance(self) -> bool:
        """Moves what can be moved now, or waits for more; says whether the command has ended and all is collected."""
        self._check()
        moved = self._collector.drain(self._goes_on)
        moved = self._feeder.feed() or moved
        if not moved:
            # In this order: the connection may end behind the exit status.
            if not self._is_connected() and not self._channel.status_event.is_set():
                raise _broken()
            if self._channel.exit_status_ready():
                return self._is_drained()
        elif self._channel.exit_status_ready() and self._is_overdue():
            return True
        self._deadline.require()
        if not moved:
            self._collector.wait(WAIT_SECONDS if self._feeder.is_done else WAIT_WHILE_SENDING_SECONDS)
        return False

    def _is_drained(self) -> bool:
        """Output may come in behind the exit status; what a background process still holds open may never end."""
        if self._channel.eof_received or not self._collector.wait(LAST_OUTPUT_SECONDS):
            return True
        return not self._collector.drain(self._goes_on)

    def _is_overdue(self) -> bool:
        """Says whether the command ended so long ago that what still comes in is not its own."""
        self._ended_at = self._ended_at or time.monotonic()
        return time.monotonic() - self._ended_at > LAST_OUTPUT_MAX_SECONDS

    def _goes_on(self) -> bool:
        """Ends an exchange whose output never pauses. Output that is complete is bounded, and may be collected late."""
        self._check()
        if self._channel.eof_received:
            return True
        self._deadline.require()
        return not (self._channel.exit_status_ready() and self._is_overdue())


def _broken() -> ConnectionError:
    return ConnectionError("The connection broke.")
