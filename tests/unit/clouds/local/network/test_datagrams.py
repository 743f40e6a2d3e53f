"""The frames of UDP datagrams and pings: what is read from a hostile machine's, and what it is answered with."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from provisioner.clouds.local.network import datagrams, egress
from provisioner.clouds.local.network.datagrams import (
    Datagram,
    DatagramFlows,
    Flow,
    Resolvers,
    parse_resolv_conf,
    refuse,
)
from tests.unit.clouds.local.network import frame_maker
from tests.unit.clouds.local.network.frame_maker import MAC, payload_of, ping, udp
from tests.unit.fakes.clock import WaitingClock
from tests.waiting import BOUND_SECONDS, until

PEER = "203.0.113.7"
FLOW = Flow(datagrams.UDP, 4000, socket.inet_aton(PEER), 53)
GOOD = udp(PEER, 53, 4000, b"question")


def changed(start: int, replacement: bytes) -> bytes:
    return GOOD[:start] + replacement + GOOD[start + len(replacement) :]


def test_a_datagram_is_read() -> None:
    assert datagrams.parse(GOOD) == Datagram(FLOW, MAC, b"question")
    assert datagrams.parse(GOOD + bytes(18)) == Datagram(FLOW, MAC, b"question")  # Ethernet pads short frames
    assert datagrams.parse(udp(PEER, 53, 4000, b"")) == Datagram(FLOW, MAC, b"")


def test_a_ping_is_read_with_its_header() -> None:
    datagram = datagrams.parse(ping(PEER, 77, b"data"))
    assert datagram is not None
    assert datagram.flow == Flow(datagrams.ICMP, 77, socket.inet_aton(PEER), 0)
    assert datagram.payload[:2] == b"\x08\x00"
    assert datagram.payload[4:] == struct.pack("!HH", 77, 1) + b"data"


WRONG = {
    "empty": b"",
    "short": GOOD[:41],
    "ipv6": changed(12, b"\x86\xdd"),
    "options": changed(14, b"\x46"),
    "version": changed(14, b"\x65"),
    "total-small": changed(16, b"\x00\x1b"),
    "total-large": changed(16, struct.pack("!H", len(GOOD) - 14 + 1)),
    "total-huge": changed(16, b"\xff\xff"),
    "first-fragment": changed(20, b"\x20\x00"),
    "later-fragment": changed(20, b"\x00\x01"),
    "tcp": changed(23, b"\x06"),
    "no-echo": changed(23, b"\x01"),
    "length-small": changed(38, struct.pack("!H", 7)),
    "length-large": changed(38, struct.pack("!H", 17)),
    "source-port": changed(34, b"\0\0"),
    "port": changed(36, b"\0\0"),
    "other-source": udp(PEER, 53, 4000, b"question", source="192.0.2.66"),
}


@pytest.mark.parametrize("frame", WRONG.values(), ids=WRONG)
def test_a_frame_that_is_not_exactly_right_is_no_datagram(frame: bytes) -> None:
    assert datagrams.parse(frame) is None


@given(st.binary(max_size=200))
def test_no_frame_breaks_the_parser(frame: bytes) -> None:
    datagrams.parse(frame)


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=8))
def test_what_a_broken_frame_carries_lies_within_it(changes: list[tuple[int, int]]) -> None:
    frame = bytearray(GOOD)
    for place, value in changes:
        frame[place] = value
    datagram = datagrams.parse(bytes(frame))
    assert datagram is None or datagram.payload in bytes(frame)


def refused(frame: bytes) -> list[bytes]:
    answers: list[bytes] = []
    refuse(frame, answers.append)
    return answers


@pytest.mark.parametrize(
    "frame",
    [udp("10.0.0.1", 53, 9, b"x"), ping("10.0.0.1", 7), frame_maker.ipv4(6, "10.0.0.1", bytes(20))],
    ids=["udp", "ping", "tcp"],
)
def test_a_refusal_quotes_what_it_refuses(frame: bytes) -> None:
    message = payload_of(refused(frame))
    assert message[:2] == b"\x03\x0d"
    assert frame_maker.checksum(message) == 0
    assert message[8:] == frame[14:42]


@pytest.mark.parametrize(
    "frame",
    [
        frame_maker.ipv4(1, "10.0.0.1", b"\x03\x0d" + bytes(6)),
        udp("224.0.0.1", 53, 9, b"x"),
        udp("255.255.255.255", 53, 9, b"x"),
        udp("10.0.0.1", 53, 9, b"x", source="10.0.3.99"),
        frame_maker.ipv4(1, "10.0.0.1", b""),
    ],
    ids=["an error", "many", "all", "another's", "empty"],
)
def test_nothing_is_said_of_what_may_not_be_refused(frame: bytes) -> None:
    assert refused(frame) == []


@example(bytes(65_507), 1)
@given(st.binary(max_size=5000), st.integers(0, 1 << 40))
def test_an_answer_comes_in_frames_of_the_cards_size(data: bytes, identification: int) -> None:
    frames = datagrams.frames(FLOW, MAC, data, identification)
    assert payload_of(frames)[8:] == data
    assert payload_of(frames)[:4] == struct.pack("!HH", 53, 4000)
    assert {frame[18:20] for frame in frames} == {struct.pack("!H", identification & 0xFFFF)}


def test_a_ping_is_answered_with_the_machines_identifier() -> None:
    flow = Flow(datagrams.ICMP, 77, socket.inet_aton(PEER), 0)
    reply = struct.pack("!BBHHH", 0, 0, 0xABCD, 999, 1) + b"data"
    assert payload_of(datagrams.frames(flow, MAC, reply, 1))[4:] == struct.pack("!HH", 77, 1) + b"data"
    for other in (b"", reply[:7], b"\x03" + reply[1:]):
        assert datagrams.frames(flow, MAC, other, 1) == []


LOOPBACK = "127.0.0.1"


class Guest:
    """A machine's flows and the frames that they answered."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.resolvers = Resolvers()
        self.flows = DatagramFlows(self.frames.append, self.resolvers)

    async def answer(self, count: int = 1) -> list[bytes]:
        """Waits for so many frames."""
        await asyncio.to_thread(until, lambda: len(self.frames) >= count)
        frames, self.frames[:] = self.frames[:], []
        return frames


def play(scene: Callable[[Guest, socket.socket], Awaitable[None]]) -> None:
    """Runs a scene with a machine and a peer."""

    async def run() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
            peer.bind((LOOPBACK, 0))
            peer.settimeout(BOUND_SECONDS)
            guest = Guest()
            expiry = asyncio.create_task(guest.flows.expire())
            await asyncio.sleep(0)
            await scene(guest, peer)
            expiry.cancel()
            await asyncio.wait([expiry])

    asyncio.run(run())


def port_of(peer: socket.socket) -> int:
    port: int = peer.getsockname()[1]
    return port


def set_time(
    monkeypatch: pytest.MonkeyPatch, guest: Guest, clock: WaitingClock, time: Callable[[], float] | None = None
) -> None:
    """Has the flows' time go on by a clock alone, which it sets to the present.

    Args:
        time: returns the clock's time.
    """
    loop = asyncio.get_running_loop()
    clock.seconds = loop.time()
    ours = SimpleNamespace(time=time or clock.monotonic, add_reader=loop.add_reader, remove_reader=loop.remove_reader)
    monkeypatch.setattr(guest.flows, "_loop", ours)


def test_a_flow_has_a_port_of_the_kernels_and_its_answer() -> None:
    async def scene(guest: Guest, peer: socket.socket) -> None:
        guest.flows.forward(udp(LOOPBACK, port_of(peer), 8125, b"question"))
        data, source = peer.recvfrom(100)
        assert data == b"question"
        assert source[1] != 8125
        peer.sendto(bytes(3000), source)
        frames = await guest.answer(3)
        assert payload_of(frames)[:4] == struct.pack("!HH", port_of(peer), 8125)
        assert payload_of(frames)[8:] == bytes(3000)

    play(scene)


def test_only_the_peer_is_heard() -> None:
    async def scene(guest: Guest, peer: socket.socket) -> None:
        guest.flows.forward(udp(LOOPBACK, port_of(peer), 4000, b"question"))
        _, source = peer.recvfrom(100)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.sendto(b"for a program of the host", source)
        peer.sendto(b"answer", source)
        [frame] = await guest.answer()  # what was sent before it would come before it
        assert payload_of([frame])[8:] == b"answer"

    play(scene)


def test_a_new_flow_ends_the_one_that_was_silent_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datagrams, "MAX_FLOWS", 2)

    async def scene(guest: Guest, peer: socket.socket) -> None:
        sources = {}
        for port in (1, 2, 1, 3):
            guest.flows.forward(udp(LOOPBACK, port_of(peer), port, b"x"))
            sources[port] = peer.recvfrom(100)[1]
        for port in (2, 1, 3):
            peer.sendto(bytes([port]), sources[port])
        # By the machine's port: the newest flow may have the ended one's port of the host, and hear its datagram.
        answered = {struct.unpack("!H", payload_of([frame])[2:4])[0] for frame in await guest.answer(2)}
        assert answered == {1, 3}

    play(scene)


def test_new_flows_over_the_rate_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datagrams, "NEW_FLOWS_PER_SECOND", 1)
    monkeypatch.setattr(datagrams, "NEW_FLOWS_AT_ONCE", 2)
    clock = WaitingClock()

    async def scene(guest: Guest, peer: socket.socket) -> None:
        def send(*ports: int) -> None:
            for port in ports:
                guest.flows.forward(udp(LOOPBACK, port_of(peer), port, bytes([port])))

        set_time(monkeypatch, guest, clock)
        send(1, 2, 3, 1)
        clock.seconds += 1
        send(4, 5, 1)
        clock.seconds += 1000
        send(6, 7, 8, 1)
        assert [peer.recv(100)[0] for _ in range(8)] == [1, 2, 1, 4, 1, 6, 7, 1]

    play(scene)


def test_an_idle_flow_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datagrams, "EXPIRY_SECONDS", 0.01)
    clock, looks = WaitingClock(), [0]

    def time() -> float:
        looks[0] += 1
        return clock.seconds

    async def pass_by(seconds: float) -> None:
        """Lets seconds pass, and has what expired by then end: the second look is after the first one's work."""
        clock.seconds += seconds
        before = looks[0]
        await asyncio.to_thread(until, lambda: looks[0] > before + 1)

    async def scene(guest: Guest, peer: socket.socket) -> None:
        set_time(monkeypatch, guest, clock, time)
        guest.flows.forward(udp(LOOPBACK, port_of(peer), 1, b"x"))
        _, source = peer.recvfrom(100)
        await pass_by(datagrams.IDLE_SECONDS - 1)
        peer.sendto(b"in time", source)
        await guest.answer()
        await pass_by(2)
        peer.sendto(b"too late", source)
        guest.flows.forward(udp(LOOPBACK, port_of(peer), 2, b"x"))
        peer.sendto(b"another flow's", peer.recvfrom(100)[1])
        [frame] = await guest.answer()
        assert payload_of([frame])[8:] == b"another flow's"

    play(scene)


def test_dns_goes_to_the_hosts_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(guest: Guest, peer: socket.socket) -> None:
        monkeypatch.setattr(datagrams, "DNS_PORT", port_of(peer))
        guest.flows.forward(udp(egress.RESOLVER, port_of(peer), 4000, b"question"))
        _, source = peer.recvfrom(100)
        peer.sendto(b"answer", source)
        [frame] = await guest.answer()
        assert frame[26:30] == socket.inet_aton(egress.RESOLVER)
        guest.flows.forward(udp(egress.RESOLVER, port_of(peer) + 1, 4000, b"no DNS"))
        guest.flows.forward(ping(egress.RESOLVER, 1))

    play(scene)


def test_what_cannot_be_sent_is_dropped() -> None:
    async def scene(guest: Guest, peer: socket.socket) -> None:
        port = port_of(peer)
        peer.close()
        for _ in range(3):  # the kernel reports a refusal with the next datagram
            guest.flows.forward(udp(LOOPBACK, port, 4000, b"x"))
            await asyncio.sleep(0)
        guest.flows.forward(udp("255.255.255.255", 9, 4000, b"x"))
        guest.flows.forward(b"no frame")
        assert guest.frames == []

    play(scene)


def test_a_ping_is_answered_under_the_machines_identifier() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ping_group_range").read_text().split())
    if low > high:
        pytest.skip("this host forbids pings")

    async def scene(guest: Guest, _: socket.socket) -> None:
        guest.flows.forward(ping(LOOPBACK, 77, b"data"))
        assert payload_of(await guest.answer())[4:] == struct.pack("!HH", 77, 1) + b"data"

    play(scene)


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("# comment\nnameserver 192.0.2.1\nsearch x\nnameserver 2001:db8::1 \n", ("192.0.2.1", "2001:db8::1")),
        ("", ("127.0.0.1",)),
        ("nameserver\nnameserver nonsense\n", ("127.0.0.1",)),
        ("".join(f"nameserver 192.0.2.{number}\n" for number in range(5)), ("192.0.2.0", "192.0.2.1", "192.0.2.2")),
    ],
    ids=["two", "none", "broken", "many"],
)
def test_resolv_conf_is_read_as_glibc_reads_it(text: str, addresses: tuple[str, ...]) -> None:
    assert parse_resolv_conf(text) == addresses


@pytest.fixture
def resolvers() -> Resolvers:
    resolvers = Resolvers()
    resolvers.replace(["first", "second"])
    return resolvers


def test_the_next_resolver_is_asked_after_a_silent_one(resolvers: Resolvers) -> None:
    assert [resolvers.choose(at) for at in (0, 1, 3.9, 5, 6, 9.5)] == [*["first"] * 3, *["second"] * 2, "first"]


def test_a_resolver_that_answers_is_kept(resolvers: Resolvers) -> None:
    for at in range(0, 100, 3):
        assert resolvers.choose(at) == "first"
        resolvers.answered()


def test_new_resolvers_are_asked_from_the_first_on(resolvers: Resolvers) -> None:
    resolvers.choose(0)
    resolvers.replace(["first", "second"])
    assert resolvers.choose(9) == "second"
    resolvers.replace(["third"])
    assert resolvers.choose(10) == "third"
