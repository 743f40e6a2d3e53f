"""Flows over real sockets of the loopback, which the frame filter in front of them would refuse."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from provisioner.clouds.local.network import datagrams, egress_rules
from provisioner.clouds.local.network.datagrams import DatagramFlows
from provisioner.clouds.local.network.resolvers import Resolvers
from tests.unit.clouds.local.network.frame_maker import payload_of, ping, udp
from tests.unit.fakes.clock import WaitingClock
from tests.waiting import BOUND_SECONDS, until

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
        guest.flows.forward(udp(egress_rules.RESOLVER, port_of(peer), 4000, b"question"))
        _, source = peer.recvfrom(100)
        peer.sendto(b"answer", source)
        [frame] = await guest.answer()
        assert frame[26:30] == socket.inet_aton(egress_rules.RESOLVER)
        guest.flows.forward(udp(egress_rules.RESOLVER, port_of(peer) + 1, 4000, b"no DNS"))
        guest.flows.forward(ping(egress_rules.RESOLVER, 1))

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
