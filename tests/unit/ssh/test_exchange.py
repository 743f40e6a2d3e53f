"""Tests one call's input, output and end, over a scripted channel without any machine."""

from __future__ import annotations

import io
import json
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest

from provisioner.ssh import exchange as exchange_module
from provisioner.ssh.exchange import (
    BoundedBuffer,
    Completed,
    Deadline,
    InputFeeder,
    Listener,
    OutputCollector,
    StreamSize,
)
from provisioner.ssh.exec_frames import ALIVE, EXIT, HEADER, STARTED, STDERR, STDIN, STDIN_END, STDOUT, frame


class ScriptedChannel:
    """A channel on which the test plays the machine. It is readable while something is pending."""

    def __init__(self) -> None:
        self.eof_received = 0
        self.closed = False
        self.sent = bytearray()
        self.takes_bytes = 1 << 20
        self.gives_bytes = 7
        self.refuses = False
        self.pending = b""
        self._readable, self._written = socket.socketpair()

    def answer(self, *frames: bytes) -> None:
        self.pending += b"".join(frames)
        self._written.send(b"x")

    def end(self, code: int = 0) -> None:
        self.answer(frame(EXIT, json.dumps({"code": code}).encode()))

    def close(self) -> None:
        self._readable.close()
        self._written.close()

    def fileno(self) -> int:
        return self._readable.fileno()

    def recv_ready(self) -> bool:
        return bool(self.pending)

    def recv(self, limit_bytes: int, /) -> bytes:
        data, self.pending = self.pending[: self.gives_bytes], self.pending[self.gives_bytes :]
        return data

    def send_ready(self) -> bool:
        return self.takes_bytes > 0

    def send(self, data: bytes, /) -> int:
        if self.refuses:
            raise OSError("Socket is closed")
        self.sent += data[: self.takes_bytes]
        return min(len(data), self.takes_bytes)

    def input(self) -> bytes:
        """Returns the input in what was sent after the request, which must be whole frames."""
        rest, data = bytes(self.sent).removeprefix(b"request"), b""
        while rest:
            kind, length = HEADER.unpack_from(rest)
            assert kind == STDIN or (kind, length) == (STDIN_END, 0)
            data += rest[HEADER.size : HEADER.size + length]
            rest = rest[HEADER.size + length :]
        assert kind == STDIN_END
        return data


@pytest.fixture
def channel() -> Iterator[ScriptedChannel]:
    with closing(ScriptedChannel()) as opened:
        yield opened


class Cancelled(Exception):
    """What a check raises."""


def exchange(
    channel: ScriptedChannel,
    *,
    stdin: bytes = b"",
    is_up: bool = True,
    timeout_seconds: float | None = 20,
    limit_bytes: int = 100,
    on_stdout: Listener | None = None,
    checks: int | None = None,
) -> Completed:
    left = iter(range(checks or 1 << 30))

    def check() -> None:
        if next(left, None) is None:
            raise Cancelled

    feeder = InputFeeder(channel, b"request", io.BytesIO(stdin), Counter())
    collector = OutputCollector(limit_bytes, on_stdout, None, Counter())
    deadline = Deadline("cat", timeout_seconds)
    return exchange_module.exchange(channel, feeder, collector, deadline, lambda: is_up, check)


def test_output_and_exit_code_are_returned(channel: ScriptedChannel) -> None:
    channel.answer(frame(STARTED), frame(STDOUT, b"out"), frame(ALIVE), frame(STDERR, b"err"))
    channel.end(3)
    assert exchange(channel) == Completed(3, b"out", b"err", None, StreamSize(3), StreamSize(3))


def test_kept_output_is_bounded_but_a_listener_gets_all_of_it(channel: ScriptedChannel) -> None:
    heard: list[bytes] = []
    channel.answer(frame(STARTED), frame(STDOUT, b"a" * 10), frame(STDOUT, b"b" * 10))
    channel.end()
    done = exchange(channel, limit_bytes=8, on_stdout=heard.append)
    assert done.stdout == b"aaaa\n[... 12 bytes cut out ...]\nbbbb"
    assert heard == [b"a" * 10, b"b" * 10]


def test_a_flood_of_tiny_pieces_is_passed_on_in_few(channel: ScriptedChannel) -> None:
    heard: list[bytes] = []
    channel.gives_bytes = 1 << 16
    channel.answer(frame(STARTED), *([frame(STDOUT, b"o"), frame(STDERR, b"e")] * 10_000))
    channel.end()
    done = exchange(channel, limit_bytes=1 << 20, on_stdout=heard.append)
    assert (done.stdout, done.stderr) == (b"o" * 10_000, b"e" * 10_000)
    assert b"".join(heard) == done.stdout
    assert len(heard) < 100


@pytest.mark.parametrize("takes_bytes", [1 << 20, 1000], ids=["eager", "slow"])
def test_request_and_input_are_sent_whole_and_in_order(channel: ScriptedChannel, takes_bytes: int) -> None:
    channel.takes_bytes = takes_bytes

    def listen(data: bytes) -> None:
        if not bytes(channel.sent).endswith(frame(STDIN_END)):
            channel.answer(frame(STDOUT, data))
        else:
            channel.end()

    channel.answer(frame(STARTED), frame(STDOUT, b"go on"))
    exchange(channel, stdin=b"i" * 100_000, on_stdout=listen)
    assert channel.input() == b"i" * 100_000


@pytest.mark.parametrize("refuses", [True, False], ids=["closed", "full"])
def test_a_command_may_end_without_reading_its_input(channel: ScriptedChannel, refuses: bool) -> None:
    channel.takes_bytes, channel.refuses = int(refuses), refuses
    channel.answer(frame(STARTED))
    channel.end(2)
    assert exchange(channel, stdin=b"unread").exit_code == 2


@pytest.mark.parametrize(
    ("number", "what", "code"),
    [(2, "program", 127), (13, "program", 126), (8, "program", 126), (2, "user", 127), (13, "directory", 127)],
    ids=["missing", "forbidden", "no program", "user", "directory"],
)
def test_what_cannot_start_has_a_shells_exit_code_and_its_errno(
    channel: ScriptedChannel, number: int, what: str, code: int
) -> None:
    said = {"errno": number, "what": what, "text": "\x1b[2Jno"}
    channel.answer(frame(EXIT, json.dumps(said).encode()))
    done = exchange(channel)
    assert (done.exit_code, done.errno, done.stdout) == (code, number, b"")
    assert done.stderr.decode().strip().isprintable()


@pytest.mark.parametrize("lost", ["connection", "channel", "end"])
def test_a_call_without_an_end_is_lost(channel: ScriptedChannel, lost: str) -> None:
    channel.answer(frame(STARTED), frame(STDOUT, b"half")[:-1])
    channel.closed, channel.eof_received = lost == "channel", int(lost == "end")
    with pytest.raises(ConnectionError):
        exchange(channel, is_up=lost != "connection")


def test_a_connection_that_is_lost_after_the_end_does_not_matter(channel: ScriptedChannel) -> None:
    channel.answer(frame(STARTED))
    channel.end(5)
    channel.closed = True
    assert exchange(channel, is_up=False).exit_code == 5


def test_a_server_that_is_silent_for_too_long_is_given_up(
    channel: ScriptedChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "SILENCE_SECONDS", 0.05)
    channel.answer(frame(STARTED))
    with pytest.raises(ConnectionError, match="silent"):
        exchange(channel, timeout_seconds=None)


def test_a_slow_listener_is_no_silence(channel: ScriptedChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "SILENCE_SECONDS", 0.05)
    monkeypatch.setattr(exchange_module, "WAIT_SECONDS", 0.01)
    channel.answer(frame(STARTED), *[frame(STDOUT, b"piece ")] * 5)
    channel.end()
    assert exchange(channel, on_stdout=lambda _: time.sleep(0.1)).stdout == b"piece " * 5


@pytest.mark.parametrize("said", [False, True], ids=["controller", "machine"])
def test_a_command_that_does_not_end_in_time_raises_a_timeout(channel: ScriptedChannel, said: bool) -> None:
    if said:
        channel.answer(frame(EXIT, b'{"timed_out": true}'))
    with pytest.raises(TimeoutError, match=r"^cat did not end within 0\.1 s\.$"):
        exchange(channel, timeout_seconds=0.1)


def test_a_command_that_has_ended_never_times_out(channel: ScriptedChannel) -> None:
    class Whole(ScriptedChannel):
        def recv(self, limit_bytes: int, /) -> bytes:
            data, self.pending = self.pending, b""
            return data

    with closing(Whole()) as whole:
        whole.answer(frame(STARTED))
        whole.end()
        assert exchange(whole, timeout_seconds=-1).exit_code == 0


class EndlessChannel(ScriptedChannel):
    """A channel that never runs out of output. It fails before a test would hang."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = -1

    def recv_ready(self) -> bool:
        return True

    def recv(self, limit_bytes: int, /) -> bytes:
        self.pieces += 1
        assert self.pieces < 1_000_000, "the deadline was put off"
        return frame(STDERR, b"y") if self.pieces else frame(STARTED)


def test_constant_output_delays_neither_deadline_nor_check() -> None:
    with closing(EndlessChannel()) as channel:
        with pytest.raises(TimeoutError):
            exchange(channel, timeout_seconds=0.1)
        channel.pieces = -1
        with pytest.raises(Cancelled):
            exchange(channel, checks=3)
        assert channel.pieces <= 3


def test_endless_input_does_not_delay_the_deadline(channel: ScriptedChannel) -> None:
    channel.takes_bytes = 1
    with pytest.raises(TimeoutError):
        exchange(channel, stdin=b"i" * 1_000_000, timeout_seconds=0.01)
    assert len(channel.sent) < 1_000_000


@pytest.mark.parametrize(
    ("limit_bytes", "beginning_bytes", "written", "kept"),
    [
        (8, None, [b"12345678"], b"12345678"),
        (8, None, [b"1234", b"5678", b"9"], b"1234\n[... 1 bytes cut out ...]\n6789"),
        (8, None, [b"123456789abc"], b"1234\n[... 4 bytes cut out ...]\n9abc"),
        (8, None, [b"1"] * 1000 + [b"end."], b"1111\n[... 996 bytes cut out ...]\nend."),
        (1, None, [b"first", b"last"], b"f\n[... 7 bytes cut out ...]\nt"),
        (8, None, [], b""),
        (8, 0, [b"12345678"], b"12345678"),
        (8, 0, [b"first", b"last5678"], b"\n[... 5 bytes cut out ...]\nlast5678"),
        (8, 0, [b"1"] * 1000 + [b"end."], b"\n[... 996 bytes cut out ...]\n1111end."),
    ],
    ids=[
        *("all-of-it", "one-too-many", "in-one-piece", "in-a-thousand-pieces", "hardly-any-room", "nothing"),
        *("end-of-all", "end-of-two-pieces", "end-of-a-thousand-pieces"),
    ],
)
def test_the_first_and_the_last_half_are_kept_or_the_end_alone(
    limit_bytes: int, beginning_bytes: int | None, written: list[bytes], kept: bytes
) -> None:
    buffer = BoundedBuffer(limit_bytes, beginning_bytes=beginning_bytes)
    for data in written:
        buffer.write(data)
    assert buffer.value() == kept
    total = sum(len(data) for data in written)
    assert buffer.size == StreamSize(total, total - len(re.sub(rb"\n\[.* cut out .*\]\n", b"", kept)))


def test_endless_output_takes_a_bounded_amount_of_memory() -> None:
    buffer = BoundedBuffer(1000)
    for _ in range(1000):
        buffer.write(bytes(100))
        assert len(buffer._head) + len(buffer._tail) <= 1500
