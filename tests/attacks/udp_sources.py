"""What a machine with full internet does to its host's UDP ports. Runs in a network namespace of its own.

Plays the machine before the real egress proxy and passt, and prints as JSON what the host sees.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.local.test_egress_proxy import Machine
from tests.unit.clouds.local.network.frame_maker import ping, udp

SOURCES = 20_000
VICTIM_PORT = 8125
# Behind the router: a machine reaches no network of its host.
PEER = "203.0.113.99"


def bound_ports(protocol: str) -> set[int]:
    """The ports or identifiers that are taken in this namespace."""
    lines = Path(f"/proc/self/net/{protocol}").read_text().splitlines()[1:]
    return {int(line.split()[1].rpartition(":")[2], 16) for line in lines}


def settle(machine: Machine) -> None:
    """Waits until the proxy has worked off what it was sent: ARP is answered in turn."""
    machine.arp()
    time.sleep(0.3)


def main() -> None:
    """Sends from 20,000 ports, and then a datagram of the host's own to one of these ports."""
    for command in (
        *("link set lo up", "link add out type veth peer name far", "address add 192.0.2.1/24 dev out"),
        *("link set out up", "link set far up"),
        "route add default via 192.0.2.98",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    # A user namespace's only group, or any group.
    groups = "0 2147483647" if os.geteuid() == 0 else f"{os.getegid()} {os.getegid()}"
    Path("/proc/sys/net/ipv4/ping_group_range").write_text(groups)
    machine = Machine("--full-internet")
    try:
        before = bound_ports("udp")
        for source in range(1025, 1025 + SOURCES):
            machine.send_frame(udp(PEER, 9, source, b"x"))
        settle(machine)
        machine.send_frame(udp(PEER, 9, VICTIM_PORT, b"x"))  # after a pause, in which a new flow may begin again
        settle(machine)
        taken = bound_ports("udp") - before
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as program:
            program.sendto(b"for the host alone", ("127.0.0.1", VICTIM_PORT))
        stolen = machine.receive(lambda frame: b"for the host alone" in frame, 1.0) is not None
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as program:
                program.bind(("0.0.0.0", VICTIM_PORT))
            free = True
        except OSError:
            free = False
        machine.close()
        machine = Machine("--full-internet")  # whose flows begin at their full rate
        for identifier in range(2000):
            machine.send_frame(ping(PEER, identifier))
        settle(machine)
        answer = {
            "taken": len(taken),
            "outside_the_ephemeral_range": len([port for port in taken if not low <= port <= high]),
            "pings": len(bound_ports("icmp")),
            "stolen": stolen,
            "free": free,
        }
    finally:
        machine.close()
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
