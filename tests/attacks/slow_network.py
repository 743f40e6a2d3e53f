"""Probes a far network namespace over a slow line that loses packets. Runs in a network namespace of its own.

Usage: python -m tests.attacks.slow_network ROUND_TRIP_SECONDS LOSS, where LOSS is "first" if the first packet to each
service is lost. Everything that the probes ask for is there. Prints as JSON the program's answers and what was heard.
"""

from __future__ import annotations

import contextlib
import heapq
import io
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from itertools import count
from typing import Any

from provisioner.clouds.guest_files import SENT

NEAR, FAR, FAR6 = "192.0.2.1", "192.0.2.2", "2001:db8::2"
WORD = "0123456789abcdef" * 2
# name: promised, method, arguments
PROBES: dict[str, tuple[bool, str, tuple[Any, ...]]] = {
    "tcp": (False, "tcp", (FAR, 8080)),
    "tcp6": (False, "tcp6", (FAR6, 443)),
    "metadata": (False, "metadata", (FAR,)),
    "udp": (False, "udp", (FAR, 53)),
    "dns_tcp": (False, "dns_tcp", (FAR,)),
    "ping": (False, "ping", (FAR,)),
    "knock": (False, "knock", (FAR, 1001, WORD)),
    "knock_udp": (False, "knock_udp", (FAR, 1002, WORD)),
    "neighbour": (True, "tcp", (FAR, 22)),
    "allowed": (True, "allowed", (FAR, 8443)),
}
# Of packet(7): ETH_P_ALL, SOL_PACKET and PACKET_VNET_HDR, with which checksums that are still to be made stay so.
ALL_PROTOCOLS, PACKET_LEVEL, WITH_HEADER, HEADER_BYTES = 3, 263, 15, 10
ADDRESSES = ("02:00:00:00:00:01", "02:00:00:00:00:02")


def ip(*commands: str) -> None:
    """Runs `ip` with each of the commands."""
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


def service_of(frame: bytes) -> tuple[int, int, int]:
    """Returns protocol, destination port (0 without ports) and destination's last byte of an IPv4 or IPv6 frame."""
    if frame[12:14] == b"\x86\xdd":
        protocol, payload, last = frame[20], frame[54:], frame[53]
    else:
        protocol, payload, last = frame[23], frame[34:], frame[33]
    ports = protocol in (socket.IPPROTO_TCP, socket.IPPROTO_UDP)
    return protocol, struct.unpack("!H", payload[2:4])[0] if ports else 0, last


def open_wires() -> list[socket.socket]:
    """Opens both ends of the line, on which nothing is carried yet."""
    wires = []
    for number in range(2):
        wires.append(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))
        wires[-1].setsockopt(PACKET_LEVEL, WITH_HEADER, 1)
        wires[-1].bind((f"wire{number}", ALL_PROTOCOLS))
    return wires


def carry(wires: list[socket.socket], delay_seconds: float, first_is_lost: bool) -> None:
    """Carries frames between the two ends of the line, each after a delay."""
    lost: set[tuple[int, int, int]] = set()
    on_the_way: list[tuple[float, int, bytes, socket.socket]] = []
    order = count()
    while True:
        patience = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        for wire in select.select(wires, [], [], patience)[0]:
            frame, (_, _, kind, *_) = wire.recvfrom(1 << 17)
            if kind == socket.PACKET_OUTGOING:
                continue
            if first_is_lost and wire is wires[0] and (service := service_of(frame[HEADER_BYTES:])) not in lost:
                lost.add(service)
                continue
            other = wires[1 - wires.index(wire)]
            heapq.heappush(on_the_way, (time.monotonic() + delay_seconds, next(order), frame, other))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, _, frame, wire = heapq.heappop(on_the_way)
            wire.send(frame)


def answer(server: socket.socket, said: bytes) -> None:
    """Answers each client of a TCP service, or prints the word that it says."""
    while True:
        visitor, _ = server.accept()
        with visitor, contextlib.suppress(OSError):
            if said:
                visitor.recv(512)
                visitor.sendall(said)
            elif word := visitor.recv(64):
                sys.stdout.write(f"tcp {word.decode()}\n")  # not print, which writes line and end apart


def hear(receiver: socket.socket, *, answers: bool) -> None:
    """Answers each datagram, or prints the word in it."""
    while True:
        data, sender = receiver.recvfrom(512)
        if answers:
            receiver.sendto(data, sender)
        else:
            sys.stdout.write(f"udp {data.decode()}\n")


def offer() -> None:
    """Offers every service until stdin ends. Each word that is heard is printed."""
    said_at = {22: b"", 1001: b"", 8080: b"", 8443: b"", 80: b"HTTP/1.1 401 Unauthorized\r\n\r\n", 53: b"\0\x1e..."}
    servers = [(socket.create_server(("", port)), said) for port, said in said_at.items()]
    servers.append((socket.create_server(("::", 443), family=socket.AF_INET6), b""))
    for server in servers:
        threading.Thread(target=answer, args=server, daemon=True).start()
    for port in (53, 1002):
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        receiver.bind(("", port))
        threading.Thread(target=hear, args=(receiver,), kwargs={"answers": port == 53}, daemon=True).start()
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    print("ready")
    sys.stdin.read()


def main(round_trip_seconds: float, first_is_lost: bool) -> None:
    """Runs the probe program once."""
    far = subprocess.Popen(
        ["unshare", "--net", sys.executable, "-m", "tests.attacks.slow_network", "far"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert far.stdin
    assert far.stdout
    assert far.stdout.readline() == "unshared\n"
    for number, address in enumerate(ADDRESSES):
        ip(
            f"link add line{number} address {address} type veth peer name wire{number}",
            f"link set wire{number} arp off",
            f"link set wire{number} up",
        )
    ip("link set lo up", f"link set line1 netns {far.pid}", f"address add {NEAR}/24 dev line0", "link set line0 up",
       "address add 2001:db8::1/64 dev line0 nodad", f"neighbour add {FAR} dev line0 lladdr {ADDRESSES[1]}",
       f"neighbour add {FAR6} dev line0 lladdr {ADDRESSES[1]}")  # fmt: skip
    far.stdin.write("go\n")
    far.stdin.flush()
    assert far.stdout.readline() == "ready\n"
    line = (open_wires(), round_trip_seconds / 2, first_is_lost)
    threading.Thread(target=carry, args=line, daemon=True).start()
    rows = [[name, promised, None, method, *arguments] for name, (promised, method, arguments) in PROBES.items()]
    request = {"word": "w", "cards": (), "probes": {"root": rows}}
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-"],
        input=f"{(SENT / 'probe.py').read_text()}\n\nmain({request!a})\n".encode(),
        stdout=subprocess.PIPE,
        check=True,
    )
    seconds = time.monotonic() - begin
    time.sleep(2 * round_trip_seconds)
    far.stdin.close()
    heard = sorted({line.strip() for line in far.stdout})
    far.wait()
    json.dump({"answers": json.loads(done.stdout)[1], "heard": heard, "seconds": seconds}, sys.stdout)


def far_main() -> None:
    """Waits for the line's far end, and offers the services there."""
    print("unshared", flush=True)
    os.read(0, 3)
    ip("link set lo up", f"address add {FAR}/24 dev line1", "link set line1 up",
       f"address add {FAR6}/64 dev line1 nodad", f"neighbour add {NEAR} dev line1 lladdr {ADDRESSES[0]}",
       f"neighbour add 2001:db8::1 dev line1 lladdr {ADDRESSES[0]}")  # fmt: skip
    offer()


if __name__ == "__main__":
    if sys.argv[1] == "far":
        far_main()
    else:
        main(float(sys.argv[1]), sys.argv[2] == "first")
