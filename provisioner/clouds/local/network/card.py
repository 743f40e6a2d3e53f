"""Writes frames to a machine's internet card from two sources: passt's stream, and answers to datagrams."""

from __future__ import annotations

import asyncio
import socket
from collections import deque

from provisioner.clouds.local.network.egress_rules import CHUNK_BYTES, is_for_machine, sift

# Answers that wait while QEMU is busy; more are dropped, as a network does.
MAX_WAITING = 256


class Card:
    """The stream socket whose other end is QEMU's. Nothing is ever written into the middle of another frame.

    Args:
        qemu: non-blocking.
    """

    def __init__(self, qemu: socket.socket) -> None:
        self._qemu = qemu
        self._turn = asyncio.Lock()
        self._waiting: deque[bytes] = deque()
        self._has_waiting = asyncio.Event()

    def offer(self, frame: bytes) -> None:
        """Queues one frame."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(len(frame).to_bytes(4, "big") + frame)
            self._has_waiting.set()

    async def write_offered(self) -> None:
        """Writes the queued frames, until it is cancelled."""
        while await self._has_waiting.wait():
            frames = b"".join(self._waiting)
            self._waiting.clear()
            self._has_waiting.clear()
            await self._write(frames)

    async def copy(self, passt: socket.socket) -> None:
        """Copies those of passt's frames that are for the machine, until the end of its stream.

        Raises:
            ValueError: the stream cannot be followed.
        """
        loop = asyncio.get_running_loop()
        pending = b""
        while data := await loop.sock_recv(passt, CHUNK_BYTES):
            frames, pending = sift(pending + data, is_for_machine)
            await self._write(frames)

    async def _write(self, frames: bytes) -> None:
        async with self._turn:
            await asyncio.get_running_loop().sock_sendall(self._qemu, frames)
