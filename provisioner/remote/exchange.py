"""Runs one command over an open SSH channel: sends its input, collects its output, waits for its end.

Knows neither paramiko nor the user. Output is untrusted: its size is bounded here, its content checked elsewhere.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import IO, Protocol

from provisioner.errors import CommandTimeoutError
from provisioner.remote.output_buffer import BoundedBuffer

SENT_BYTES_AT_ONCE = 1 << 15
RECEIVED_BYTES_AT_ONCE = 1 << 16
# How long to wait for output. Only briefly while there is input to send: the machine may take more before it answers.
WAIT_WHILE_SENDING_SECONDS = 0.05
WAIT_SECONDS = 0.5
# The last output may arrive this long after the exit status.
LAST_OUTPUT_SECONDS = 0.1
# Output is collected for at most this long after the exit status: a background process may write for ever.
LAST_OUTPUT_MAX_SECONDS = 2.0

Listener = Callable[[bytes], None]


class Channel(Protocol):
    """Describes an SSH channel on which a command was started. paramiko's Channel fits.

    Attributes:
        eof_received: true once the machine has said that no more output will come.
        status_event: set once the exit status is there, or the channel was closed.
    """

    eof_received: int
    status_event: Event

    def fileno(self) -> int:
        """Returns a file descriptor that is readable when there is output."""

    def recv_ready(self) -> bool:
        """Returns whether a piece of stdout has arrived."""

    def recv(self, limit_bytes: int, /) -> bytes:
        """Takes a piece of stdout; empty at the end."""

    def recv_stderr_ready(self) -> bool:
        """Returns whether a piece of stderr has arrived."""

    def recv_stderr(self, limit_bytes: int, /) -> bytes:
        """Takes a piece of stderr; empty at the end."""

    def send_ready(self) -> bool:
        """Returns whether the machine can take input now."""

    def send(self, data: bytes, /) -> int:
        """Sends input and returns how many bytes of it were sent.

        Raises:
            OSError: the channel was closed.
        """

    def shutdown_write(self) -> None:
        """Tells the machine that no more input will come."""

    def exit_status_ready(self) -> bool:
        """Returns whether the command has ended."""

    def recv_exit_status(self) -> int:
        """Returns the exit code, or -1 if a signal killed the command or the channel was lost."""


@dataclass(frozen=True)
class Completed:
    """Holds a finished command's exit code (-1 if a signal killed it) and its bounded output."""

    exit_code: int
    stdout: bytes
    stderr: bytes


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
        if self._timeout_seconds is not None and time.monotonic() - self._begin > self._timeout_seconds:
            raise CommandTimeoutError(f"{self._command} did not end within {self._timeout_seconds:g} s.")


class InputFeeder:
    """Sends a command's input as fast as the machine takes it, then closes it.

    Args:
        channel: the command's channel.
        source: the command's whole input.
    """

    def __init__(self, channel: Channel, source: IO[bytes]) -> None:
        self._channel = channel
        self._source = source
        self._pending = b""
        self.is_done = False

    def feed(self) -> bool:
        """Sends as much as the machine takes now and returns whether anything was sent.

        A command may end before it has read its input; the rest is then dropped.
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
        except OSError:  # closed: the exit status or a lost connection tells why
            self.is_done = True
            return False
        self._pending = self._pending[sent_bytes:]
        return True


class OutputCollector:
    """Keeps a command's output within a limit and passes on each piece as it arrives.

    Args:
        channel: the command's channel.
        limit_bytes: how much of each stream is kept; the middle of a longer one is cut out.
        on_stdout, on_stderr: called with each piece.
    """

    def __init__(
        self, channel: Channel, limit_bytes: int, on_stdout: Listener | None, on_stderr: Listener | None
    ) -> None:
        self._channel = channel
        self._stdout, self._stderr = BoundedBuffer(limit_bytes), BoundedBuffer(limit_bytes)
        self._on_stdout, self._on_stderr = on_stdout, on_stderr
        self.listening_seconds = 0.0  # spent in the listeners, which may block: a pager that nobody scrolls

    def drain(self, goes_on: Callable[[], bool]) -> bool:
        """Takes the output that has arrived and returns whether there was any.

        Args:
            goes_on: asked after each piece, since output may never pause; the call ends if it is false.
        """
        channel, moved = self._channel, False
        while channel.recv_ready() and (data := channel.recv(RECEIVED_BYTES_AT_ONCE)):
            self._keep(data, self._stdout, self._on_stdout)
            moved = True
            if not goes_on():
                break
        while channel.recv_stderr_ready() and (data := channel.recv_stderr(RECEIVED_BYTES_AT_ONCE)):
            self._keep(data, self._stderr, self._on_stderr)
            moved = True
            if not goes_on():
                break
        return moved

    def wait(self, seconds: float) -> bool:
        """Waits for output and returns whether there is any. A closed channel counts as output."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            return bool(selector.select(seconds))

    def _keep(self, data: bytes, buffer: BoundedBuffer, listener: Listener | None) -> None:
        buffer.write(data)
        if listener:
            begin = time.monotonic()
            listener(data)
            self.listening_seconds += time.monotonic() - begin

    def completed(self, exit_code: int) -> Completed:
        """Returns the finished command with the output that was kept."""
        return Completed(exit_code, self._stdout.value(), self._stderr.value())


class Exchange:
    """Carries one command from its start to its end.

    Args:
        channel: the command's channel.
        feeder: sends the command's input.
        collector: takes the command's output.
        deadline: the time by which the command must have ended.
        is_connected: returns whether the connection that carries the channel is still up.
        check: called repeatedly; an exception that it raises ends the exchange.
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
        """Sends input and collects output until the command ends. Processes in the background may keep running.

        Raises:
            ConnectionError: the connection broke before the exit status came.
            CommandTimeoutError: the deadline has passed.
        """
        while not self._advance():
            pass
        self._collector.drain(self._goes_on)
        exit_code = self._channel.recv_exit_status()
        if exit_code == -1 and not self._is_connected():
            raise _broken()
        return self._collector.completed(exit_code)

    def _advance(self) -> bool:
        """Moves data, or waits for some; returns whether the command has ended and all its output is collected."""
        self._check()
        moved = self._collector.drain(self._goes_on)
        moved = self._feeder.feed() or moved
        if not moved:
            # In this order: the connection may end after the exit status has arrived.
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
        """Returns whether the last output is collected. Does not wait for the output of background processes."""
        if self._channel.eof_received or not self._collector.wait(LAST_OUTPUT_SECONDS):
            return True
        return not self._collector.drain(self._goes_on)

    def _is_overdue(self) -> bool:
        """Returns whether the command ended so long ago that further output is not its own."""
        # A slow listener of the caller's is no sign that the output is another process's.
        moment = time.monotonic() - self._collector.listening_seconds
        self._ended_at = self._ended_at or moment
        return moment - self._ended_at > LAST_OUTPUT_MAX_SECONDS

    def _goes_on(self) -> bool:
        """Returns whether to collect more output. Complete output is finite, so it may be collected late.

        Raises:
            CommandTimeoutError: the deadline has passed.
        """
        self._check()
        if self._channel.eof_received:
            return True
        self._deadline.require()
        return not (self._channel.exit_status_ready() and self._is_overdue())


def _broken() -> ConnectionError:
    return ConnectionError("The connection broke.")
