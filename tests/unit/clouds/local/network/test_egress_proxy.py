"""Tests that the egress proxy's connections end when they are cancelled, as they are once their machine has ended."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from ipaddress import IPv4Network
from typing import Any

import pytest

from provisioner.clouds.local.network import egress_proxy
from provisioner.clouds.local.network.egress import Counters, Rule
from provisioner.clouds.local.network.egress_proxy import Card, _forward
from tests.unit.clouds.local.network import frame_maker
from tests.unit.clouds.local.network.frame_maker import framed
from tests.waiting import BOUND_SECONDS


@pytest.mark.parametrize("steps", range(8))
def test_a_connection_that_is_made_as_it_is_cancelled_ends(steps: int) -> None:
    """Cancels the connection so many steps of the event loop after its destination has accepted it."""

    async def race(listener: socket.socket) -> bool:
        loop, accepts = asyncio.get_running_loop(), asyncio.Event()

        async def connect(onward: socket.socket, destination: Any) -> None:
            await accepts.wait()
            onward.setblocking(True)
            onward.connect(destination)
            onward.setblocking(False)

        loop.sock_connect = connect  # type: ignore[assignment]
        host, port = listener.getsockname()
        with socket.create_connection((host, port)):
            rules = [Rule(IPv4Network(host), port)]
            connection = asyncio.create_task(_forward(listener.accept()[0], rules, Counters(None)))
            for _ in range(10):
                await asyncio.sleep(0)
            accepts.set()
            for _ in range(steps):
                await asyncio.sleep(0)
            connection.cancel()
            ended, _ = await asyncio.wait([connection], timeout=BOUND_SECONDS)
            connection.cancel()  # so that a failure of this test does not hang it
            return connection in ended

    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert asyncio.run(race(listener))


def split(stream: bytes) -> list[bytes]:
    frames = []
    while stream:
        end = 4 + int.from_bytes(stream[:4], "big")
        frames.append(stream[4:end])
        stream = stream[end:]
    return frames


def test_no_answer_falls_into_the_middle_of_passts_frames() -> None:
    passts = [bytes([1]) * random.randrange(1, 2000) for _ in range(300)]
    stream = b"".join(map(framed, passts))

    async def scene() -> bytes:
        (qemu, machine), (passt, theirs) = socket.socketpair(), socket.socketpair()
        ends = (qemu, machine, passt, theirs)
        for end in ends:
            end.setblocking(False)
        writer = Card(qemu)
        offered = asyncio.create_task(writer.write_offered())
        copied = asyncio.create_task(writer.copy(passt))
        loop, received = asyncio.get_running_loop(), b""
        for start in range(0, len(stream), 777):
            await loop.sock_sendall(theirs, stream[start : start + 777])
            writer.offer(b"answer")
            await asyncio.sleep(0)
            received += await loop.sock_recv(machine, 1 << 20)
        theirs.close()
        await copied
        offered.cancel()
        qemu.close()
        while data := await loop.sock_recv(machine, 1 << 20):
            received += data
        for end in ends:
            end.close()
        return received

    frames = split(asyncio.run(asyncio.wait_for(scene(), 20)))
    assert [frame for frame in frames if frame != b"answer"] == passts
    assert frames.count(b"answer") > 100


def test_answers_to_a_stalled_machine_are_dropped() -> None:
    async def scene() -> int:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            writer = Card(ours)
            for _ in range(10_000):
                writer.offer(bytes(1500))
            ours.setblocking(False)
            theirs.setblocking(False)
            task = asyncio.create_task(writer.write_offered())
            received = 0
            while received < egress_proxy.MAX_WAITING * 1504:
                received += len(await asyncio.get_running_loop().sock_recv(theirs, 1 << 20))
            task.cancel()
            return received

    assert asyncio.run(asyncio.wait_for(scene(), 20)) == egress_proxy.MAX_WAITING * 1504


def test_a_segment_without_flags_does_not_reach_the_machine() -> None:
    """Were it to, its conntrack would find it invalid, and the connection of a container would be reset."""
    acknowledgement, announcement = (
        frame_maker.ipv4(6, "192.0.2.1", struct.pack("!HHIIBBHHH", 80, 5000, 1, 2, 0x50, flags, 9, 0, 0))
        for flags in (0x10, 0)
    )

    async def scene() -> bytes:
        (qemu, machine), (passt, theirs) = socket.socketpair(), socket.socketpair()
        with qemu, machine, passt, theirs:
            for end in (qemu, passt):
                end.setblocking(False)
            theirs.sendall(framed(acknowledgement) + framed(announcement) + framed(acknowledgement))
            theirs.shutdown(socket.SHUT_WR)
            await Card(qemu).copy(passt)
            return machine.recv(1 << 16)

    assert split(asyncio.run(asyncio.wait_for(scene(), 20))) == [acknowledgement] * 2
