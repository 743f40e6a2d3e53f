"""Tests one command's input, output and end, over a scripted channel without any machine."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from provisioner.remote.exchange import Completed, Deadline, Exchange, InputFeeder, Listener, OutputCollector


class ScriptedChannel:
    """A channel on which the test plays the machine. It is readable while output or the end is pending."""

    def __init__(self) -> None:
        self.eof_received: int = False
        self.status_event = threading.Event()
        self.sent = bytearray()
        self.takes_bytes = 1 << 20
        self.shutdowns = 0
        self.is_closed = False
        self._stdout: list[bytes] = []
        self._stderr: list[bytes] = []
        self._exit_code: int | None = None
        self._readable, self._written = socket.socketpair()

    def print(self, stdout: bytes = b"", stderr: bytes = b"") -> None:
        self._stdout += [stdout] if stdout else []
        self._stderr += [stderr] if stderr else []
        self._written.send(b"x")

    def end(self, exit_code: int = 0, *, eof: bool = True) -> None:
        self._exit_code, self.eof_received = exit_code, eof
        self.status_event.set()

    def close(self) -> None:
        self._readable.close()
        self._written.close()

    def fileno(self) -> int:
        return self._readable.fileno()

    def recv_ready(self) -> bool:
        return bool(self._stdout)

    def recv(self, limit_bytes: int, /) -> bytes:
        return self._stdout.pop(0)

    def recv_stderr_ready(self) -> bool:
        return bool(self._stderr)

    def recv_stderr(self, limit_bytes: int, /) -> bytes:
        return self._stderr.pop(0)

    def send_ready(self) -> bool:
        return self.takes_bytes > 0

    def send(self, data: bytes, /) -> int:
        if self.is_closed:
            raise OSError("Socket is closed")
        sent = data[: self.takes_bytes]
        self.sent += sent
        return len(sent)

    def shutdown_write(self) -> None:
        self.shutdowns += 1

    def exit_status_ready(self) -> bool:
        return self.status_event.is_set()

    def recv_exit_status(self) -> int:
        return -1 if self._exit_code is None else self._exit_code


@pytest.fixture
def channel() -> Iterator[ScriptedChannel]:
    opened = ScriptedChannel()
    yield opened
    opened.close()


class Connected:
    """A connection that is up until the test breaks it, and that counts the calls of its `check`."""

    def __init__(self) -> None:
        self.is_up = True
        self.checks = 0

    def is_active(self) -> bool:
        return self.is_up

    def check(self) -> None:
        self.checks += 1


def exchange(
    channel: ScriptedChannel,
    *,
    stdin: bytes = b"",
    connection: Connected | None = None,
    timeout_seconds: float | None = None,
    limit_bytes: int = 100,
    on_stdout: Listener | None = None,
) -> Completed:
    connection = connection or Connected()
    return Exchange(
        channel=channel,
        feeder=InputFeeder(channel, io.BytesIO(stdin)),
        collector=OutputCollector(channel, limit_bytes, on_stdout, None),
        deadline=Deadline("cat", timeout_seconds),
        is_connected=connection.is_active,
        check=connection.check,
    ).finish()


def test_output_and_exit_code_are_returned(channel: ScriptedChannel) -> None:
    channel.print(b"out", b"err")
    channel.end(3)
    assert exchange(channel) == Completed(3, b"out", b"err")


def test_kept_output_is_bounded_but_a_listener_gets_all_of_it(channel: ScriptedChannel) -> None:
    heard: list[bytes] = []
    channel.print(b"a" * 10)
    channel.print(b"b" * 10)
    channel.end()
    done = exchange(channel, limit_bytes=8, on_stdout=heard.append)
    assert done.stdout == b"aaaa\n[... 12 bytes cut out ...]\nbbbb"
    assert heard == [b"a" * 10, b"b" * 10]


@pytest.mark.parametrize("takes_bytes", [1 << 20, 1000], ids=["eager", "slow"])
def test_all_input_is_sent_and_closed_once(channel: ScriptedChannel, takes_bytes: int) -> None:
    channel.takes_bytes = takes_bytes
    channel.end()
    exchange(channel, stdin=b"i" * 100_000)
    assert bytes(channel.sent) == b"i" * 100_000
    assert channel.shutdowns == 1


def test_a_command_may_end_without_reading_its_input(channel: ScriptedChannel) -> None:
    channel.takes_bytes = 0
    channel.end(2)
    assert exchange(channel, stdin=b"unread").exit_code == 2


def test_the_exit_code_is_returned_if_the_channel_closes_while_input_is_sent(channel: ScriptedChannel) -> None:
    channel.is_closed = True
    channel.end(4)
    assert exchange(channel, stdin=b"unread").exit_code == 4


def test_a_connection_lost_while_input_is_sent_is_an_error(channel: ScriptedChannel) -> None:
    connection = Connected()
    connection.is_up = False
    channel.is_closed = True
    channel.end(-1)
    with pytest.raises(ConnectionError):
        exchange(channel, stdin=b"unread", connection=connection)


def test_output_after_the_exit_status_is_collected(channel: ScriptedChannel) -> None:
    channel.end(eof=False)
    threading.Timer(0.02, channel.print, [b"late"]).start()
    assert exchange(channel).stdout == b"late"


def test_output_held_open_by_a_background_process_is_not_awaited(channel: ScriptedChannel) -> None:
    channel.end(eof=False)
    assert exchange(channel, timeout_seconds=5) == Completed(0, b"", b"")


def test_a_command_that_does_not_end_in_time_raises_a_timeout(channel: ScriptedChannel) -> None:
    with pytest.raises(TimeoutError, match=r"^cat did not end within 0\.1 s\.$"):
        exchange(channel, timeout_seconds=0.1)


def test_a_command_that_has_ended_never_times_out(channel: ScriptedChannel) -> None:
    channel.end()
    assert exchange(channel, timeout_seconds=-1).exit_code == 0


class EndlessChannel(ScriptedChannel):
    """A channel with another piece of output after each pause."""

    _has_piece = False

    def recv_ready(self) -> bool:
        self._has_piece = not self._has_piece
        return self._has_piece

    def recv(self, limit_bytes: int, /) -> bytes:
        return b"y"


def test_endless_output_does_not_delay_the_deadline() -> None:
    channel = EndlessChannel()
    with pytest.raises(TimeoutError):
        exchange(channel, timeout_seconds=0.1)
    channel.close()


class PauselessChannel(ScriptedChannel):
    """A channel that never runs out of output. It fails before a test would hang."""

    def __init__(self, stream: str) -> None:
        super().__init__()
        self.stream = stream
        self.pieces = 0

    def recv_ready(self) -> bool:
        return self.stream == "stdout"

    def recv_stderr_ready(self) -> bool:
        return self.stream == "stderr"

    def recv(self, limit_bytes: int, /) -> bytes:
        self.pieces += 1
        assert self.pieces < 1_000_000, "the deadline was put off"
        return b"y"

    recv_stderr = recv


@pytest.mark.parametrize("has_ended", [False, True], ids=["running", "ended"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_that_never_pauses_does_not_delay_the_deadline(stream: str, has_ended: bool) -> None:
    with closing(PauselessChannel(stream)) as channel:
        if has_ended:  # a background process keeps writing
            channel.end(eof=False)
        with pytest.raises(TimeoutError):
            exchange(channel, timeout_seconds=0.1)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_background_process_that_writes_for_ever_does_not_delay_the_end(
    stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("provisioner.remote.exchange.LAST_OUTPUT_MAX_SECONDS", 0.05)
    with closing(PauselessChannel(stream)) as channel:
        channel.end(3, eof=False)
        assert exchange(channel).exit_code == 3


def test_a_slow_listener_gets_all_output_of_a_command_that_has_ended(
    channel: ScriptedChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("provisioner.remote.exchange.LAST_OUTPUT_MAX_SECONDS", 0.02)
    for _ in range(5):
        channel.print(b"piece ")
    channel.end(0, eof=False)
    assert exchange(channel, on_stdout=lambda _: time.sleep(0.02)).stdout == b"piece " * 5


def test_output_that_never_pauses_does_not_delay_the_check() -> None:
    class Cancelled(Exception):
        pass

    class Cancelling(Connected):
        def check(self) -> None:
            super().check()
            if self.checks == 3:
                raise Cancelled

    with closing(PauselessChannel("stdout")) as channel:
        with pytest.raises(Cancelled):
            exchange(channel, connection=Cancelling())
        assert channel.pieces <= 3


def test_endless_input_does_not_delay_the_deadline(channel: ScriptedChannel) -> None:
    channel.takes_bytes = 1
    with pytest.raises(TimeoutError):
        exchange(channel, stdin=b"i" * 1_000_000, timeout_seconds=0.01)
    assert len(channel.sent) < 1_000_000


def test_complete_output_is_collected_even_after_the_deadline() -> None:
    class Late(ScriptedChannel):
        def exit_status_ready(self) -> bool:
            self.print(b"last")
            self.end()
            return True

    with closing(Late()) as late:
        assert exchange(late, timeout_seconds=-1).stdout == b"last"


def test_a_lost_connection_is_an_error(channel: ScriptedChannel) -> None:
    connection = Connected()
    connection.is_up = False
    with pytest.raises(ConnectionError):
        exchange(channel, connection=connection)


def test_a_connection_lost_after_the_exit_status_does_not_matter(channel: ScriptedChannel) -> None:
    connection = Connected()
    connection.is_up = False
    channel.end(5)
    assert exchange(channel, connection=connection).exit_code == 5


@pytest.mark.parametrize("is_up", [True, False], ids=["killed-by-a-signal", "connection-lost"])
def test_a_missing_exit_code_means_a_signal_only_while_the_connection_is_up(
    channel: ScriptedChannel, is_up: bool
) -> None:
    connection = Connected()
    connection.is_up = is_up
    channel.end(-1)
    if is_up:
        assert exchange(channel, connection=connection).exit_code == -1
    else:
        with pytest.raises(ConnectionError):
            exchange(channel, connection=connection)


def test_an_exception_from_check_ends_the_exchange(channel: ScriptedChannel) -> None:
    class Cancelled(Exception):
        pass

    class Cancelling(Connected):
        def check(self) -> None:
            super().check()
            if self.checks == 3:
                raise Cancelled

    channel.print(b"first")
    with pytest.raises(Cancelled):
        exchange(channel, connection=Cancelling())
