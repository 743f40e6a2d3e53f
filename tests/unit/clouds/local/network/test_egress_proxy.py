"""Tests that the egress proxy's connections end when they are cancelled, as they are once their machine has ended."""

from __future__ import annotations

import asyncio
import socket
from ipaddress import IPv4Network
from typing import Any

import pytest

from provisioner.clouds.local.network.egress import Counters
from provisioner.clouds.local.network.egress_proxy import _forward
from provisioner.clouds.local.network.egress_rules import Rule
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
