"""Decides what a local machine may send and reach: allowlist entries, the host's own networks, Ethernet frames. Pure.

Standard library only. The machine is hostile: it may send any frame.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

# Static configuration of the machine's internet card: this address, prefix length and default route, no DHCP.
# Not slirp's 10.0.2.0/24, which the management card has.
GUEST_ADDRESS = "10.0.3.15"
PREFIX_LENGTH = 24
GATEWAY = "10.0.3.2"
GATEWAY_MAC = "52:54:00:00:03:02"
# With full internet, DNS over UDP to this address goes to the host's resolver (TEST-NET-2: never a real host).
RESOLVER = "198.51.100.53"

# Never reachable and never allowlisted: this host, link-local services (cloud metadata), multicast, reserved.
NEVER = tuple(
    ipaddress.IPv4Network(cidr) for cidr in ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4")
)

# A message carries at most 253 descriptors (SCM_MAX_FD), and a socket filter at most 4096 instructions.
MAX_RULES = 200
MAX_FRAME_BYTES = 1 << 17
MAX_VERDICTS = 4096


@dataclass(frozen=True)
class Rule:
    """One allowlisted destination: an IPv4 network and a TCP port."""

    network: ipaddress.IPv4Network
    port: int


def parse_allow(text: str) -> Rule:
    """Reads one allowlisted destination.

    Args:
        text: CIDR:PORT, such as 203.0.113.7/32:443.

    Raises:
        ValueError: it is not an IPv4 network and TCP port, or it includes addresses that no machine may reach.
    """
    cidr, _, port = text.rpartition(":")
    if not re.fullmatch(r"[0-9.]+(/[0-9]+)?", cidr) or not re.fullmatch(r"[0-9]{1,5}", port):
        raise ValueError(f"{text!r} is not of the form IPv4-CIDR:PORT")
    network = ipaddress.IPv4Network(cidr)
    if not 1 <= int(port) <= 65535:
        raise ValueError(f"{text!r}: ports are 1 to 65535")
    if forbidden := [str(never) for never in NEVER if never.overlaps(network)]:
        raise ValueError(f"{text!r} overlaps {forbidden[0]}, which is never reachable")
    return Rule(network, int(port))


def allows(rules: Sequence[Rule], address: str, port: int) -> bool:
    """Whether a rule covers this IPv4 address and TCP port."""
    return any(rule.port == port and ipaddress.IPv4Address(address) in rule.network for rule in rules)


def host_networks(fib_trie: str) -> tuple[ipaddress.IPv4Network, ...]:
    """Reads the host's own and broadcast addresses.

    Args:
        fib_trie: the text of /proc/net/fib_trie: an address on one line, `/LENGTH host LOCAL` on the lines below it.
    """
    networks = set()
    address = ""
    for line in fib_trie.splitlines():
        if match := re.match(r"\s*\|-- ([0-9.]+)$", line):
            address = match[1]
        elif match := re.match(r"\s*/([0-9]+) \w+ (?:LOCAL|BROADCAST)\b", line):
            networks.add(ipaddress.IPv4Network((address, int(match[1])), strict=False))
    return tuple(sorted(networks))


class FrameFilter:
    """Drops what a machine with full internet must not send: everything but ARP, and IPv4 to permitted addresses.

    Ethernet frames, each preceded by its length in 4 bytes, big endian (QEMU's and passt's stream format).

    Attributes:
        denied: how many frames to denied addresses were dropped.
    """

    def __init__(self) -> None:
        """Starts with only NEVER denied."""
        self.denied = 0
        self._pending = b""
        self._verdicts: dict[bytes, bool] = {}
        self._denied: tuple[ipaddress.IPv4Network, ...] = NEVER

    def deny(self, networks: Sequence[ipaddress.IPv4Network]) -> None:
        """Replaces the networks that are denied in addition to NEVER."""
        self._denied = (*NEVER, *networks)
        self._verdicts.clear()

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes of the machine's stream, and returns the frames that are now complete and may pass.

        Raises:
            ValueError: a frame is longer than any that QEMU sends, so the stream cannot be followed further.
        """
        stream = self._pending + data
        passing, start = [], 0
        while len(stream) - start >= 4:
            length = int.from_bytes(stream[start : start + 4], "big")
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            end = start + 4 + length
            if end > len(stream):
                break
            if self._passes(stream[start + 4 : end]):
                passing.append(stream[start:end])
            start = end
        self._pending = stream[start:]
        return b"".join(passing)

    def _passes(self, frame: bytes) -> bool:
        if frame[12:14] == b"\x08\x06":
            return True
        if frame[12:14] != b"\x08\x00" or len(frame) < 34 or frame[14] >> 4 != 4:
            return False
        destination = frame[30:34]
        if destination not in self._verdicts:
            if len(self._verdicts) >= MAX_VERDICTS:
                self._verdicts.clear()
            address = ipaddress.IPv4Address(destination)
            self._verdicts[destination] = not any(address in network for network in self._denied)
        if not self._verdicts[destination]:
            self.denied += 1
        return self._verdicts[destination]
