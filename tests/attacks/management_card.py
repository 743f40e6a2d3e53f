"""Plays a hostile machine before the other end of its management card, and prints as JSON what the kernel answers.

Runs in a network of its own (provisioner.clouds.local.vm.confinement), with the machine's end of the card as argument.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys

from provisioner.clouds.local.vm import confinement
from tests.unit.clouds.local.network.frame_maker import checksum

GUEST, HOST = (bytes.fromhex(mac.replace(":", "")) for mac in (confinement.GUEST_MAC, confinement.CARD_MAC))
OWN = "fe80::5054:ff:fe00:202"
CLAIMED = 3000
WAIT_SECONDS = 2.0


def arp(claimed: str) -> bytes:
    """Asks for the host's address, as a machine that has the claimed one."""
    ends = GUEST + socket.inet_aton(claimed) + bytes(6) + socket.inet_aton(confinement.CARD_ADDRESS)
    return b"\xff" * 6 + GUEST + b"\x08\x06" + struct.pack("!HHBBH", 1, 0x800, 6, 4, 1) + ends


def syn(source: str, target: str, port: int) -> bytes:
    """Opens a connection."""
    ends = socket.inet_aton(source) + socket.inet_aton(target)
    plain = struct.pack("!HHIIBBHHH", 40000, port, 1000, 0, 0x50, 0x02, 64000, 0, 0)
    segment = plain[:16] + struct.pack("!H", checksum(ends + struct.pack("!HH", 6, 20) + plain)) + plain[18:]
    header = struct.pack("!BBHHHBBH", 0x45, 0, 40, 1, 0x4000, 64, 6, 0)
    return HOST + GUEST + b"\x08\x00" + header[:10] + struct.pack("!H", checksum(header + ends)) + ends + segment


def solicitation(number: int) -> bytes:
    """Asks by IPv6 for the address that the host's end would choose by its MAC address, as one machine of many."""
    source, target = socket.inet_pton(socket.AF_INET6, f"fe80::{number + 1:x}"), socket.inet_pton(socket.AF_INET6, OWN)
    multicast = bytes.fromhex("ff0200000000000000000001ff") + target[13:]
    body = bytes(4) + target + b"\1\1" + GUEST
    summed = checksum(source + multicast + struct.pack("!IxxxB", 4 + len(body), 58) + b"\x87\0\0\0" + body)
    message = b"\x87\0" + struct.pack("!H", summed) + body
    return (
        b"\x33\x33\xff"
        + target[13:]
        + GUEST
        + b"\x86\xdd\x60\0\0\0"
        + struct.pack("!H", len(message))
        + b"\x3a\xff"
        + source
        + multicast
        + message
    )


def answer(card: int, frame: bytes) -> str:
    """Sends a frame, and names what comes back: an ARP reply, a reset, an ICMP error, anything else, or nothing."""
    os.write(card, frame)
    while select.select([card], [], [], WAIT_SECONDS)[0]:
        data = os.read(card, 2048)
        if data[12:14] == b"\x08\x06" and data[20:22] == b"\0\x02":
            return "arp"
        if data[12:14] == b"\x08\x00":
            return "reset" if data[23] == 6 and data[47] & 4 else "icmp" if data[23] == 1 else "other"
    return ""


def main() -> None:
    """Attacks, and says what came of it."""
    card = int(sys.argv[1])
    here, guest = confinement.CARD_ADDRESS, confinement.GUEST_ADDRESS
    said = {
        "own": answer(card, arp(guest)),
        "another": answer(card, arp("10.0.2.16")),
        "port": answer(card, syn(guest, here, 22)),
        "loopback": answer(card, syn(guest, "127.0.0.1", 22)),
        "internet": answer(card, syn(guest, "1.1.1.1", 443)),
        "spoofed": answer(card, syn("10.0.2.16", here, 22)),
    }
    for number in range(CLAIMED):
        with contextlib.suppress(BlockingIOError):
            os.write(card, arp(f"10.{number >> 8}.{number & 255}.7"))
            os.write(card, solicitation(number))
    neighbours = json.loads(subprocess.run(["ip", "-json", "neigh"], check=True, stdout=subprocess.PIPE).stdout)
    print(json.dumps({**said, "neighbours": [each["dst"] for each in neighbours]}))


if __name__ == "__main__":
    main()
