"""Random bytes where a machine's bytes arrive first, as many as wanted: frames, questions, answers, logs and headers.

PROVISIONER_FUZZ_INPUTS says how many inputs each target gets, and PROVISIONER_FUZZ_SECONDS (fuzzing.py) for how long it
gets them; with neither, a few hundred. The inputs are the same in every run. `pytest -rP` shows how many there were.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import socket
import struct
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from provisioner.base.printable import PrintableStream, printable, printable_lines
from provisioner.clouds.local.network import datagrams, outside_view
from provisioner.clouds.local.network.egress import (
    GUEST_ADDRESS,
    MAX_FRAME_BYTES,
    MAX_VERDICTS,
    NEVER,
    PRIVATE,
    RESOLVER,
    FrameFilter,
    is_for_machine,
    sift,
)
from provisioner.clouds.local.vm import credential_port, disk, machine_logs, qemu, shutdown
from provisioner.ssh.exec_frames import (
    ALIVE,
    DATA_LIMIT_BYTES,
    EXIT,
    LARGEST_ERRNO,
    STARTED,
    STDERR,
    STDOUT,
    TEXT_CHARACTERS,
    Answers,
    ExecViolation,
    frame,
)
from tests.attacks.fuzzing import SECONDS
from tests.unit.fakes.world import environment

INPUTS = "PROVISIONER_FUZZ_INPUTS"
FEW = 400
# Of an input, in a failure.
SHOWN_BYTES = 4096
# How often the clock is looked at.
ROUND = 1000


@dataclass(frozen=True)
class Target:
    """What takes a machine's bytes.

    Args:
        draw: returns an input.
        check: hands it over, and asserts what must hold of the result.
        raises: how an input may be refused.
    """

    draw: Callable[[random.Random], bytes]
    check: Callable[[bytes], None]
    raises: tuple[type[Exception], ...] = ()


def below(dice: random.Random, limit: int) -> int:
    """Returns a number below the limit, four times as fast as randrange."""
    return int(dice.random() * limit)


# What lengths, offsets and counts go wrong with.
NUMBERS = tuple(
    struct.pack(layout, number & (1 << 8 * struct.calcsize(layout)) - 1)
    for layout in (">B", ">H", ">I", ">Q", "<H", "<I")
    for number in (0, 1, 4, 1 << 7, 0xFF, 0xFFFF, 0x10000, 0x20000, 0x7FFFFFFF, 1 << 31, (1 << 63) - 1, -1)
)


def mutated(dice: random.Random, valid: Sequence[bytes], tokens: Sequence[bytes] = NUMBERS) -> bytes:
    """Returns one of the valid inputs, with up to four of its places changed."""
    data = bytearray(valid[below(dice, len(valid))])
    for _ in range(below(dice, 5)):
        kind, place = dice.random(), below(dice, len(data) + 1)
        if kind < 0.4 and place < len(data):
            data[place] = below(dice, 256)
        elif kind < 0.7:
            token = tokens[below(dice, len(tokens))]
            data[place : place + len(token)] = token
        elif kind < 0.8:
            del data[place : place + 1 + below(dice, 8)]
        elif kind < 0.9:
            data[place:place] = dice.randbytes(below(dice, 8))
        elif kind < 0.97:
            data[place:place] = data[below(dice, len(data) + 1) :][:64]
        else:
            del data[place:]
    return bytes(data)


def some(*draws: Callable[[random.Random], bytes]) -> Callable[[random.Random], bytes]:
    """Returns what draws from one of several, from the first of them three times out of four."""
    first, *others = draws

    def draw(dice: random.Random) -> bytes:
        return first(dice) if dice.random() < 0.75 else others[below(dice, len(others))](dice)

    return draw


def noise(limit: int) -> Callable[[random.Random], bytes]:
    return lambda dice: dice.randbytes(below(dice, limit))


GUEST, DNS, PUBLIC = socket.inet_aton(GUEST_ADDRESS), socket.inet_aton(RESOLVER), b"\x08\x08\x08\x08"
OPENED, OWN = IPv4Network("10.9.0.0/16"), IPv4Network("203.0.113.9/32")
DENIED = [(int(each.network_address), int(each.broadcast_address)) for each in (*NEVER, *PRIVATE, OWN)]
PEERS = (
    *(PUBLIC, DNS, b"\x7f\0\0\1", b"\0\0\0\0", b"\xff" * 4, b"\xa9\xfe\xa9\xfe", b"\x0a\0\x02\x02", b"\x0a\x09\1\1"),
    *(OWN.network_address.packed, b"\xcb\0\x71\x0a", b"\xe0\0\0\1", b"\x64\x64\x64\xc8", b"\xac\x1f\xff\xff"),
)
ETHERNET = bytes.fromhex("525400000302525400000003")
ARP = ETHERNET + b"\x08\x06" + bytes(28)
ICMP, TCP, UDP = 1, 6, 17


def packet(protocol: int, peer: bytes, payload: bytes, source: bytes = GUEST) -> bytes:
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(payload), 7, 0x4000, 64, protocol, 0)
    return ETHERNET + b"\x08\x00" + header + source + peer + payload


def udp(port: int, peer_port: int, data: bytes) -> bytes:
    return struct.pack("!HHHH", port, peer_port, 8 + len(data), 0) + data


def tcp(flags: int) -> bytes:
    return struct.pack("!HHIIBBHHH", 5, 80, 1, 2, 0x50, flags, 9, 0, 0)


DATAGRAMS = (
    *(packet(UDP, PUBLIC, udp(40000, 53, b"x" * 30)), packet(UDP, DNS, udp(40001, 53, b"q" * 20))),
    packet(ICMP, PUBLIC, b"\x08\0\0\0\x12\x34\0\1" + b"p" * 24),
)
SENT = (*DATAGRAMS, packet(TCP, PUBLIC, tcp(2)), ARP)


def a_frame(dice: random.Random) -> bytes:
    """Draws a frame that most often passes the first checks."""
    data = mutated(dice, SENT)
    if len(data) >= 36 and dice.random() < 0.6:  # to somewhere else, from another port
        peer = PEERS[below(dice, len(PEERS))] if dice.random() < 0.7 else dice.randbytes(4)
        data = data[:30] + peer + dice.randbytes(2) + data[36:]
    return data


def a_stream(dice: random.Random) -> bytes:
    parts = []
    for _ in range(1 + below(dice, 3)):
        data = a_frame(dice)
        parts += [len(data).to_bytes(4, "big"), data]
    if dice.random() < 0.1:
        parts.append(NUMBERS[below(dice, len(NUMBERS))])
    return b"".join(parts)


def whole_frames(stream: bytes) -> list[bytes]:
    """Returns the frames of a stream, but for one that is cut off."""
    found, place = [], 0
    while len(stream) - place >= 4:
        after = place + 4 + int.from_bytes(stream[place : place + 4], "big")
        if after > len(stream):
            break
        found.append(stream[place + 4 : after])
        place = after
    return found


def is_denied(address: bytes) -> bool:
    number = int.from_bytes(address, "big")
    return any(first <= number <= last for first, last in DENIED) and IPv4Address(number) not in OPENED


def frames(_: Path, __: pytest.MonkeyPatch) -> Target:
    """Streams of a machine's frames: nothing passes but ARP, and IPv4 in one piece to where the machine may go."""
    taken: list[bytes] = []
    refused: list[bytes] = []
    answers: list[bytes] = []

    def refuse(data: bytes) -> None:
        refused.append(data)
        datagrams.refuse(data, answers.append)

    kept = FrameFilter(taken.append, [OPENED], refuse)
    kept.deny([OWN])

    def check(stream: bytes) -> None:
        for earlier in (taken, refused, answers):
            earlier.clear()
        kept._pending, kept.denied = b"", 0
        middle = len(stream) // 3
        passed = kept.feed(stream[:middle]) + kept.feed(stream[middle:])
        assert len(passed) + len(kept._pending) <= len(stream)
        assert len(kept._pending) < 4 + MAX_FRAME_BYTES
        assert len(kept._verdicts) <= MAX_VERDICTS
        sent, through = whole_frames(stream), whole_frames(passed)
        assert sum(4 + len(each) for each in through) == len(passed)
        assert len(through) + len(taken) + len(refused) <= len(sent)
        assert kept.denied == len(refused)
        for each in through:
            assert each in sent
            assert each[12:14] == b"\x08\x06" or (each[12:15] == b"\x08\x00\x45" and each[23] == TCP)
        for each in (*(each for each in through if each[12:14] == b"\x08\x00"), *taken):
            assert each in sent
            assert not each[20] & 0x3F | each[21]
            assert not is_denied(each[30:34])
        assert all(each[23] in (ICMP, UDP) for each in taken)
        assert all(len(answer) <= 14 + 20 + 8 + 28 and answer[30:34] == GUEST for answer in answers)

    return Target(some(a_stream, noise(200)), check, (ValueError,))


ANSWERED = (
    *(packet(TCP, GUEST, tcp(flags), PUBLIC) for flags in (0, 8, 16)),
    *(packet(UDP, GUEST, udp(53, 40000, b"a"), PUBLIC), ARP),
)


def replies(_: Path, __: pytest.MonkeyPatch) -> Target:
    """Frames from passt: only TCP without SYN, RST and ACK is held back."""

    def check(stream: bytes) -> None:
        passed, pending = sift(stream, is_for_machine)
        sent, through = whole_frames(stream), whole_frames(passed)
        assert stream.endswith(pending)
        assert len(passed) + len(pending) <= len(stream)
        held = [each for each in sent if each not in through]
        assert all(each[12:14] == b"\x08\x00" and each[23] == TCP for each in held)
        assert all(is_for_machine(each, 0, len(each)) for each in through)

    def draw(dice: random.Random) -> bytes:
        data = mutated(dice, ANSWERED)
        return len(data).to_bytes(4, "big") + data + dice.randbytes(below(dice, 3))

    return Target(some(draw, noise(120)), check, (ValueError,))


class Network:
    """Stands in for the socket module and for the event loop."""

    AF_INET, AF_INET6, SOCK_DGRAM = socket.AF_INET, socket.AF_INET6, socket.SOCK_DGRAM
    IPPROTO_ICMP, IPPROTO_UDP, IPPROTO_IP = socket.IPPROTO_ICMP, socket.IPPROTO_UDP, socket.IPPROTO_IP
    inet_ntoa, inet_aton = staticmethod(socket.inet_ntoa), staticmethod(socket.inet_aton)

    def __init__(self) -> None:
        self.at = 0.0
        self.fails = False
        self.opened = 0
        self.readers: dict[Wire, tuple[Callable[[Any], None], Any]] = {}
        self.sent: list[tuple[Wire, bytes]] = []

    def time(self) -> float:
        return self.at

    def add_reader(self, wire: Wire, call: Callable[[Any], None], flow: Any) -> None:
        self.readers[wire] = call, flow

    def remove_reader(self, wire: Wire) -> None:
        del self.readers[wire]

    def socket(self, family: int, kind: int, protocol: int) -> Wire:
        assert (family, kind) == (socket.AF_INET, socket.SOCK_DGRAM)
        self.opened += 1
        return Wire(self, protocol)


class Wire:
    """Stands in for a socket."""

    def __init__(self, network: Network, protocol: int) -> None:
        self.network, self.protocol = network, protocol
        self.peer: tuple[str, int] = ("", 0)
        self.inbox: deque[tuple[bytes, tuple[str, int]]] = deque()

    def setblocking(self, _: bool) -> None: ...

    def setsockopt(self, *_: int) -> None: ...

    def connect(self, peer: tuple[str, int]) -> None:
        if self.network.fails:
            raise PermissionError("broadcast")
        self.peer = peer

    def getpeername(self) -> tuple[str, int]:
        return self.peer

    def send(self, payload: bytes) -> None:
        if self.network.fails:
            raise BlockingIOError
        self.network.sent.append((self, payload))

    def recvfrom(self, limit: int) -> tuple[bytes, tuple[str, int]]:
        if not self.inbox:
            raise BlockingIOError
        payload, source = self.inbox.popleft()
        return payload[:limit], source

    def close(self) -> None:
        self.network.opened -= 1


HOSTS_RESOLVER, STRANGER = "192.0.2.53", ("192.0.2.66", 53)


def carried(_: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Frames of datagrams: sockets are few, lead to the frame's peer alone, and only that peer's answers come back."""
    network, chance = Network(), random.Random(3)
    monkeypatch.setattr(datagrams, "socket", network)
    monkeypatch.setattr(datagrams, "asyncio", SimpleNamespace(get_running_loop=lambda: network))
    answers: list[bytes] = []
    resolvers = datagrams.Resolvers()
    resolvers.replace([HOSTS_RESOLVER])
    flows = datagrams.DatagramFlows(answers.append, resolvers)

    def answered(wire: Wire, payload: bytes, data: bytes) -> None:
        """Has the peer answer, and a stranger too."""
        reply = (b"\0" + payload[1:] if wire.protocol == ICMP else payload) * (1 + below(chance, 40))
        wire.inbox += ((reply, wire.peer), (reply, STRANGER))
        call, flow = network.readers[wire]
        call(flow)
        assert not wire.inbox
        assert sum(len(answer) - 34 for answer in answers) <= 8 + len(reply)
        for answer in answers:
            assert len(answer) <= datagrams.MTU + 14
            assert answer[23] == wire.protocol
            assert answer[26:34] == data[30:34] + GUEST

    def check(data: bytes) -> None:
        network.at += 0.01
        network.fails = chance.random() < 0.1
        network.sent.clear()
        answers.clear()
        flows.forward(data)
        assert network.opened == len(network.readers) <= datagrams.MAX_FLOWS
        for wire, payload in network.sent:
            protocol, source, peer = data[23], data[26:30], data[30:34]
            assert source == GUEST
            assert wire.protocol == protocol
            assert payload in data[34:]
            port = 0 if protocol == ICMP else int.from_bytes(data[36:38], "big")
            assert wire.peer == (HOSTS_RESOLVER if peer == DNS else socket.inet_ntoa(peer), port)
            answered(wire, payload, data)

    def draw(dice: random.Random) -> bytes:
        data = mutated(dice, DATAGRAMS)
        return data[:34] + dice.randbytes(2) + data[36:] if dice.random() < 0.3 else data

    return Target(some(draw, a_frame, noise(80)), check)


class Line:
    """Stands in for the socket of a machine that has sent something, and takes only so many bytes at once."""

    def __init__(self) -> None:
        self.given, self.room = b"", 0
        self.taken: list[bytes] = []

    def recv(self, limit: int) -> bytes:
        data, self.given = self.given[:limit], self.given[limit:]
        return data

    def send(self, data: bytes) -> int:
        if not self.room:
            raise BlockingIOError
        self.taken.append(data[: self.room])
        return len(self.taken[-1])

    def close(self) -> None: ...


def questions(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Bytes into the credentials' port: what is heard, and what is answered, is bounded by the time."""
    (directory / credential_port.CREDENTIALS).mkdir()
    (directory / credential_port.CREDENTIALS / "hosts").write_text("192.0.2.1 name\n")
    now, chance, wire = [0.0], random.Random(5), Line()
    clock = SimpleNamespace(monotonic=lambda: now[0], time_ns=lambda: 1_700_000_000 * 10**9)
    monkeypatch.setattr(credential_port, "time", clock)
    port = credential_port.CredentialPort(directory)
    heard = [0]

    def served() -> None:
        before, owed = len(wire.given), bool(port._answer)
        readable, writable = port.waits_for()
        assert len(readable) + len(writable) <= 1
        assert bool(writable) == owed
        port.serve()
        assert not owed or len(wire.given) == before  # it listens to none that owes it a look
        assert before - len(wire.given) <= credential_port.TOGETHER_BYTES
        heard[0] += len(wire.given) != before

    def check(data: bytes) -> None:
        now[0] += chance.random() / 2  # in which it may ask half a question
        wire.given, wire.room = data, below(chance, 300)
        wire.taken.clear()
        if port._socket is None:
            port._socket, port._answer = wire, b""  # type: ignore[assignment]
        for _ in range(3):
            served()
        assert heard[0] <= credential_port.QUESTIONS + now[0] * credential_port.QUESTIONS_PER_SECOND
        assert len(port._answer) <= credential_port.MAXIMUM_BYTES

    return Target(some(noise(8), lambda dice: (b"?", b"t", b".", b"?t.", b"x")[below(dice, 5)], noise(9000)), check)


ENDS = tuple(
    frame(EXIT, end)
    for end in (
        *(b'{"code": 7}', b'{"code": 255}', b'{"code": 256}', b'{"timed_out": true}', b'{"errno": 4096, "text": ""}'),
        *(b'{"errno": 2, "what": "user", "text": "\xc3\xa4"}', b'{"errno": 2, "what": "\\u001b", "text": "\\u202e"}'),
    )
)
OUTPUT = frame(STARTED) + frame(STDOUT, b"out") + frame(ALIVE) + frame(STDERR, b"err")
CALLS = (*(OUTPUT + end for end in ENDS), *ENDS)
EXEC_TOKENS = (
    *(*map(frame, (STARTED, STDOUT, ALIVE, EXIT)), frame(STDOUT, b"o"), b"x\0\0\x20\0", b"x\0\0\x20\1"),
    *(b"o\0\1\0\0", b"o\0\1\0\1", b'"', b"{", b"[[", b"1e9", b"-1", b"255", b"256", b"true", b"null", b"\x1b[2J"),
    *(b"\\ud800", b"\xff", b'"code": 1,', b"9" * 40),
)


def exec_answers(_: Path, __: pytest.MonkeyPatch) -> Target:
    """An exec server's frames, in two pieces: no output that did not come in, and an end that commands can have."""

    def check(data: bytes) -> None:
        answers, output = Answers(), 0
        middle = len(data) // 2
        try:
            for piece in (data[:middle], data[middle:]):
                for _, out in answers.feed(piece, 3.0):
                    assert 0 < len(out) <= DATA_LIMIT_BYTES
                    assert answers.started
                    output += len(out)
        finally:
            assert output + len(answers._frames._buffer) <= len(data)
            if end := answers.end:
                assert end.timed_out + (end.code is not None) + (end.errno is not None) == 1
                assert end.code is None or (answers.started and type(end.code) is int and 0 <= end.code <= 255)
                assert end.errno is None or 0 < end.errno <= LARGEST_ERRNO
                assert (end.text + end.what).replace("\t", "").isprintable()
                assert len(end.text) <= TEXT_CHARACTERS

    return Target(some(lambda dice: mutated(dice, CALLS, EXEC_TOKENS), noise(60)), check, (ExecViolation,))


CONSOLE = (
    b"[    0.000000] Linux version 6.1.0 (\x1b[1mgcc\x1b[0m)\r\n[    1.5] systemd[1]: Hostname set to <m>.\r\n",
    "\x1b]0;title\x07caf\u00e9 \u202eabc\u2066 \u200b\u2028\x85\x9b31m\r\n\tlogin: ".encode(),
    b"\x1b[31mRed\x1b[0m\x0c\x0b\x1c\x1d\x1e\r\r\n\0\x08\x7f\x1b\x1b[",
)
CONSOLE_TOKENS = (
    *(b"\x1b", b"\x1b[", b"\x1b[0;", b"\x1b[2J", b"\x1b[" + b"0" * 70, b"\x1b]52;c;AA==\x07", b"\x1bP", b"\xc2\x9b"),
    *(b"\r", b"\n", b"\r\n", b"\t", b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\xf0\x9f\x98", b"\xe2\x80\xae", b"\xc2\xad"),
    *(b"\xe2\x80\xa8", b"\xf3\xa0\x80\x81", b"\xef\xbf\xbe", b"\x1b[ " + b" " * 12),
)
UNUSUAL = re.compile("[^\n\t\x20-\x7e]")


def is_safe(text: str) -> bool:
    """Returns whether a text has neither controls nor formats, surrogates, unknown characters or odd ends of lines."""
    kinds = {unicodedata.category(character) for character in UNUSUAL.findall(text)}
    return not any(kind[0] == "C" or kind in ("Zl", "Zp") for kind in kinds)


def console(_: Path, __: pytest.MonkeyPatch) -> Target:
    """The console's text: what is shown of it steers no terminal, in one piece or in two."""

    def check(data: bytes) -> None:
        text = data.decode(errors="replace")
        line, lines = printable(text), printable_lines(text)
        assert is_safe(lines)
        assert "\n" not in line
        assert len(line) <= len(text)
        stream, middle = PrintableStream(), len(data) // 2
        shown = stream.feed(data[:middle])
        assert len(stream._held) <= 64
        shown += stream.feed(data[middle:]) + stream.flush()
        assert is_safe(shown)
        assert len(shown) <= len(text)

    return Target(some(lambda dice: mutated(dice, CONSOLE, CONSOLE_TOKENS), noise(80)), check)


LIMIT_BYTES, KEPT_BYTES = 16 << 10, 4 << 10
# The most that a file system gives to the beginning and to the end of what was written.
ROUNDED_BYTES = 16 << 10


def logs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Logs of any length, with holes: they end short, with their end, and with their beginning."""
    monkeypatch.setattr(machine_logs, "LIMIT_BYTES", LIMIT_BYTES)
    monkeypatch.setattr(machine_logs, "KEPT_BYTES", KEPT_BYTES)
    (directory / machine_logs.SERIAL).parent.mkdir()
    log = Slot(directory / machine_logs.SERIAL)

    def check(data: bytes) -> None:
        # The first bytes say how long the log is, and whether it begins with a hole.
        size, offset = struct.unpack("<HI", data[:6].ljust(6, b"\1"))
        hole = offset if data[:1] < b"\x40" else 0
        body = (data[6:] or b"x") * (1 + size // max(1, len(data) - 6))
        log.write(body, hole)
        machine_logs.trim(log.path)
        kept, status = log.read(2 * LIMIT_BYTES), log.status()
        if not hole:
            assert kept[:KEPT_BYTES] == body[:KEPT_BYTES]
            assert kept[-KEPT_BYTES:] == body[-KEPT_BYTES:]
        assert min(status.st_size, status.st_blocks * 512) <= LIMIT_BYTES + ROUNDED_BYTES

    return Target(noise(300), check)


EVENTS = (
    b'{"QMP": {}}\n{"return": {}}\n{"event": "RESET", "data": {"guest": true}}\n',
    b'{"event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-shutdown"}}\n',
    b'{"event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-\\ud800"}}\n',
    b'{"timestamp": {"seconds": 1}, "event": "SHUTDOWN", "data": {"guest": false, "reason": "host-signal"}}\r\n',
)
JSON_TOKENS = (
    *(b"{", b"}", b"[", b"]", b'"', b",", b":", b"\n", b"\r\n", b"\x85", b"null", b"true", b"1e999", b"NaN", b"-"),
    *(b"[" * 3000, b'{"a":' * 2000, b"9" * 5000, b"\\ud800", b"\xff", b"\xef\xbb\xbf", b"\0", b"\x1b[2J", b"'"),
    *(b'"data": []', b'"reason": [[]]', b'"reason": 1' + b"0" * 400, b'"return": null', b'"error": {}', b'"desc": 1'),
)


def events(_: Path, __: pytest.MonkeyPatch) -> Target:
    """The events of a QEMU that was taken over: a short reason comes of them, and a verdict."""

    def check(data: bytes) -> None:
        reason, from_within = shutdown.explain(data, 1, 1, rebooted=False)
        assert 0 < len(reason) <= shutdown.REASON_CHARACTERS + 20
        assert reason.encode()
        assert from_within in (True, False, None)

    return Target(some(lambda dice: mutated(dice, EVENTS, JSON_TOKENS), noise(80)), check)


# A header as QEMU makes it, but that the name of the disk below follows at once.
NAME_AT = 0x70
HEADER = struct.pack(
    ">4sIQIIQIIQQIIQQQQII8x", b"QFI\xfb", 3, NAME_AT, 8, 16, 1 << 30, 0, 16, 0x30000, 0x10000, 1, 0, 0, 0, 0, 0, 4, 112
)
HEADERS = tuple(HEADER + name.ljust(16, b"\0") + bytes(128) for name in (b"disk.raw", b"low.qcow", b"./me.img"))
HEADER_TOKENS = (*NUMBERS, b"QFI\xfb", b"nbd://", b'json:{"f', b"../", b"/", b"\0", b"x" * 300, b".raw")


class Slot:
    """A file that is written again and again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(exist_ok=True)
        path.touch()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def write(self, data: bytes, place: int = 0) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, data, place)

    def read(self, limit: int) -> bytes:
        return os.pread(self._descriptor, limit, 0)

    def status(self) -> os.stat_result:
        return os.fstat(self._descriptor)

    def __del__(self) -> None:
        os.close(self._descriptor)


def headers(directory: Path, _: pytest.MonkeyPatch) -> Target:
    """Headers of a disk that a machine has written: a plain one has the machine's size, and no data elsewhere."""
    layer = Slot(directory / "disk.qcow2")

    def check(data: bytes) -> None:
        layer.write(data)
        disk.require_plain(layer.path, 1)
        assert data[:8] == b"QFI\xfb\0\0\0\3"
        assert int.from_bytes(data[24:32], "big") <= 1 << 30
        assert data[32:36] == bytes(4)  # not encrypted
        assert int.from_bytes(data[72:80], "big") in (0, 1)

    draw = some(lambda dice: mutated(dice, HEADERS, HEADER_TOKENS), noise(200))
    return Target(draw, check, (disk.UntrustworthyLayerError,))


NAMES = (
    *(b"disk.raw", b"me.qcow2", b"other.qcow2", b"", b".", b"..", b"/", b"/dev/zero", b"/dev/full", b"pipe", b"loop"),
    *(b"link.raw", b"gone", b"a\0b", b"\0", b"x" * 256, b"x" * 1023, b"x" * 1024, b"a/" * 500, b"\xff\xfe", b"socket"),
    *(b"directory", b"directory.raw", b"json:{}", b"nbd://127.0.0.1", b"/proc/self/mem", b"/dev/tty", b"me.qcow2/x"),
)


def a_header(dice: random.Random) -> bytes:
    """Draws a header with a name in it, and with the name's place and length, most often the right ones."""
    name = NAMES[below(dice, len(NAMES))]
    length = len(name) if dice.random() < 0.8 else below(dice, 1200)
    place = NAME_AT if dice.random() < 0.9 else int.from_bytes(NUMBERS[below(dice, len(NUMBERS))], "big")
    return HEADER[:8] + struct.pack(">QI", place, length) + HEADER[20:NAME_AT] + name + bytes(8)


def chains(directory: Path, _: pytest.MonkeyPatch) -> Target:
    """Names in headers: what they lead to is plain files, and few of them, and looking for it always ends."""
    layer = Slot(directory / "me.qcow2")
    (directory / "other.qcow2").write_bytes(HEADER[:8] + struct.pack(">QI", NAME_AT, 8) + HEADER[20:] + b"me.qcow2" * 2)
    (directory / "disk.raw").write_bytes(b"r")
    os.mkfifo(directory / "pipe")
    (directory / "loop").symlink_to("loop")
    (directory / "link.raw").symlink_to("other.qcow2")
    for name in ("directory", "directory.raw"):
        (directory / name).mkdir()
    descriptor = os.open(directory, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{descriptor}/socket")
    os.close(descriptor)
    plain: dict[Path, bool] = {}

    def check(data: bytes) -> None:
        layer.write(data)
        found = disk.chain(layer.path)
        assert found[0] == layer.path.resolve()
        assert len(found) <= 16
        for each in found:
            if each not in plain:
                plain[each] = each.is_file()
            assert plain[each]

    return Target(some(a_header, lambda dice: mutated(dice, HEADERS, HEADER_TOKENS)), check, (OSError,))


QMP_ANSWERS = (
    b'{"return": {"status": "running", "running": true}}\n',
    b'{"event": "RESET"}\n{"timestamp": {"seconds": 1}, "event": "STOP"}\n{"return": {}}\n',
    b'{"error": {"class": "GenericError", "desc": "no"}}\n',
    b'{"error": {"desc": "\\ud800"}}\n',
    b'{"return": {"qemu": {"major": 7, "minor": 2, "micro": 19}, "package": ""}}\n',
    b'{"return": "link: index=0"}\n',
)


class Qmp(qemu.QMP):
    """A connection whose other end says something and closes it."""

    def __init__(self) -> None:
        self._timeout_seconds = 10.0
        self._received = b""
        self._socket: Any = self
        self.said: deque[bytes] = deque()

    def settimeout(self, seconds: float) -> None:
        assert 0 < seconds <= 10

    def sendall(self, _: bytes) -> None: ...

    def recv(self, _: int) -> bytes:
        return self.said.popleft() if self.said else b""


def qmp(_: Path, __: pytest.MonkeyPatch) -> Target:
    """Lines from a QEMU that was taken over: an answer, or an error with a short text."""
    connection = Qmp()
    asks: Iterator[Callable[[], object]] = itertools.cycle(
        [connection.status, connection.version, lambda: connection.monitor("info network")]
    )

    def check(data: bytes) -> None:
        connection._received = b""
        middle = len(data) // 2
        connection.said = deque(piece for piece in (data[:middle], data[middle:]) if piece)
        answer, refusal = None, ""
        try:
            answer = next(asks)()
        except qemu.QMPError as error:
            refusal = str(error)
        assert len(refusal.encode()) < 4000
        assert answer is None or len(json.dumps(answer)) <= 6 * len(data) + 10

    return Target(some(lambda dice: mutated(dice, QMP_ANSWERS, JSON_TOKENS), noise(80)), check)


MONITOR = (
    b" \\ management: index=0,type=tap,fd=9\r\n",
    b"virtio-net-pci.0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:00:00:01\r\n"
    b" \\ management: index=0,type=tap,fd=9\r\n",
    b"hub 0\r\n \\ hub0port1: link: index=0,type=nic,model=x\r\n \\ hub0port0: link0: index=0,type=dgram,\r\n",
    b" \\ internet: index=0,type=stream,fd:12\r\nfilters:\r\n"
    b"  - capture-link: type=filter-dump,file=link.pcap,maxlen=1\r\n",
)
MONITOR_TOKENS = (
    *(b" \\ ", b": ", b": index=", b",type=", b"index=1,type=tap", b"\r\n", b"\n", b"\x0b", b"\xe2\x80\xa8"),
    *(b"hub 0\r\n", b"x" * 2000, b":" * 500, b": " * 500, b"\n" * 500, b"management", b"internet: index=0,type=stream"),
    *(b"\x1b[2J", b"\n" + b"a: index=1,type=x\n" * 50, b"\n" + b"y" * 12_000 + b": index=1,type=tap\n"),
    *(b"".join(b"y%d\n" % number for number in range(400)), b"\ny" + b"\xf3\xa0\x80\x81" * 400 + b": index=1,type=a"),
)


def monitor(_: Path, __: pytest.MonkeyPatch) -> Target:
    """The monitor's words on cards: whatever they are, the difference is told in short lines."""
    env = environment("env")
    arguments = ("qemu", *qemu.network((), 0, None))
    view = outside_view.View(arguments, tuple(outside_view.INTERFACES), "", None, None)
    assert outside_view.compare(replace(view, cards=MONITOR[0].decode()), env, "primary") == []

    def check(data: bytes) -> None:
        text = data.decode(errors="surrogateescape")
        found = outside_view.compare(replace(view, cards=text), env, "primary")
        assert "".join(found).isprintable()
        assert sum(map(len, found)) < 10_000
        assert found or "management: index=" in text.replace("\r", "")

    return Target(some(lambda dice: mutated(dice, MONITOR, MONITOR_TOKENS), noise(80)), check)


TARGETS: dict[str, Callable[[Path, pytest.MonkeyPatch], Target]] = {
    "frames": frames,
    "replies": replies,
    "datagrams": carried,
    "questions": questions,
    "exec": exec_answers,
    "console": console,
    "logs": logs,
    "events": events,
    "headers": headers,
    "chains": chains,
    "qmp": qmp,
    "monitor": monitor,
}


@pytest.mark.parametrize("name", TARGETS)
def test_any_first_bytes_are_taken_or_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, dice = TARGETS[name](tmp_path, monkeypatch), random.Random(name)
    wanted, seconds = os.environ.get(INPUTS), float(os.environ.get(SECONDS, "0"))
    most = int(wanted) if wanted else None if seconds else FEW
    begin, number = time.monotonic(), 0
    while number != most and (not seconds or number % ROUND or time.monotonic() - begin < seconds):
        data = target.draw(dice)
        try:
            target.check(data)
        except target.raises:
            pass
        except Exception as error:
            shown = f"{data[:SHOWN_BYTES].hex()}{'...' if len(data) > SHOWN_BYTES else ''}"
            raise AssertionError(f"{name}: input {number} of {len(data)} bytes, in hex: {shown}") from error
        number += 1
    print(f"{name}: {number} inputs, {number / (time.monotonic() - begin):.0f} per second")
