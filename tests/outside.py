"""Serves zeros at an address that is not this host's, some way off, as servers of the internet are. Linux, as root.

Usage: python -m tests.outside. Machines reach no address of this host itself, so the server has a network namespace,
and a TUN device on either side. Packets to it take a while. It ends with its standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

# For tests of networks (RFC 2544), so that no real host has them. The server is behind a router, as no machine
# reaches a network of its host.
HERE, ROUTER, THERE = "198.18.77.1", "198.18.77.2", "198.18.78.1"
PORT = 8000
AWAY_SECONDS = 0.02
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000
_CLONE_NEWNET = 0x40000000


@contextlib.contextmanager
def server_of_zeros() -> Iterator[None]:
    """Runs the server at THERE and PORT, by TCP and by UDP. It answers each line with as many zeros as it says."""
    command = [sys.executable, "-m", "tests.outside"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout
        assert server.stdout.readline() == b"ready\n"
        yield
        server.communicate()


def _start(target: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=target, args=arguments, daemon=True).start()


def _tun(name: str, address: str, peer: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    for command in (f"address add {address} peer {peer} dev {name}", f"link set {name} up"):
        subprocess.run(["ip", *command.split()], check=True)
    return device


def _copy(source: int, sink: int, seconds: float) -> None:
    """Copies packets, each of which arrives so long after it was sent."""
    under_way: queue.Queue[tuple[float, bytes]] = queue.Queue()

    def arrive() -> None:
        while True:
            at, packet = under_way.get()
            time.sleep(max(0, at - time.monotonic()))
            os.write(sink, packet)

    _start(arrive)
    while True:
        under_way.put((time.monotonic() + seconds, os.read(source, 1 << 16)))


def _serve(connection: socket.socket) -> None:
    with contextlib.suppress(OSError), connection, connection.makefile("rb") as asked:
        for line in asked:
            connection.sendall(bytes(int(line)))


def _answer(udp: socket.socket) -> None:
    while True:
        asked, client = udp.recvfrom(1 << 16)
        udp.sendto(bytes(int(asked.split(b" ")[0])), client)


def _accept(tcp: socket.socket) -> None:
    while True:
        _start(_serve, tcp.accept()[0])


if __name__ == "__main__":
    here = _tun("outside", HERE, ROUTER)
    subprocess.run(["ip", "route", "add", THERE, "via", ROUTER], check=True)
    assert ctypes.CDLL(None).unshare(_CLONE_NEWNET) == 0
    there = _tun("outside", ROUTER, HERE)
    subprocess.run(["ip", "address", "add", THERE, "dev", "outside"], check=True)
    tcp, udp = socket.create_server((THERE, PORT)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind((THERE, PORT))
    _start(_copy, here, there, AWAY_SECONDS)
    _start(_copy, there, here, 0.0)
    _start(_accept, tcp)
    _start(_answer, udp)
    print("ready", flush=True)
    sys.stdin.read()
