"""Frames from two sources on one stream."""

from __future__ import annotations

import asyncio
import random
import socket
import struct

from provisioner.clouds.local.network import card
from provisioner.clouds.local.network.card import Card
from tests.unit.clouds.local.network import frame_maker


def framed(frame: bytes) -> bytes:
    return struct.pack("!I", len(frame)) + frame


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
            while received < card.MAX_WAITING * 1504:
                received += len(await asyncio.get_running_loop().sock_recv(theirs, 1 << 20))
            task.cancel()
            return received

    assert asyncio.run(asyncio.wait_for(scene(), 20)) == card.MAX_WAITING * 1504


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
