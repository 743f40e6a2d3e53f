"""Decides what a local machine may send and reach, starts the egress proxy that enforces it, and reads its counters.

Standard library only. The machine is hostile: it may send any frame. The proxy outlives the process that starts it.

Clouds offer metadata and credentials at link-local addresses: 169.254.169.254 (AWS, Azure, Google, Oracle and most
others), 169.254.170.2 and .23 (AWS's containers), 169.254.0.23 (Tencent), 169.254.42.42 (Scaleway). Others do not:
100.100.100.200 (Alibaba Cloud, "View instance metadata"), 168.63.129.16 (Azure, "What is IP address 168.63.129.16?",
whose wire server hands out extensions' secrets), 192.0.0.192 (Oracle Cloud Classic, in IANA's special-purpose
192.0.0.0/24). IPv6, with fd00:ec2::254 (AWS) and fd20:ce::254 (Google), is not carried at all.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import mmap
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from provisioner.base import child_environment
from provisioner.clouds.local.vm import bubblewrap
from provisioner.clouds.local.vm.processes import is_alive, start_time

# Static configuration of the machine's internet card: this address, prefix length and default route, no DHCP.
# Not 10.0.2.0/24, which the management card has.
GUEST_ADDRESS = "10.0.3.15"
PREFIX_LENGTH = 24
GATEWAY = "10.0.3.2"
GATEWAY_MAC = "52:54:00:00:03:02"
# With full internet, DNS over UDP to this address goes to the host's resolvers (TEST-NET-2: never a real host).
RESOLVER = "198.51.100.53"

# Never reachable and never allowlisted: this host, multicast, reserved, and where clouds offer a host its metadata and
# credentials. The module's docstring names the clouds.
NEVER = tuple(
    ipaddress.IPv4Network(cidr)
    for cidr in (
        *("0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/4", "240.0.0.0/4"),
        *("169.254.0.0/16", "100.100.100.200/32", "168.63.129.16/32", "192.0.0.0/24"),
    )
)

# What a machine with the internet reaches only if the operator says so (RFC 1918, RFC 6598), as it does the networks
# of the host's own cards.
PRIVATE = tuple(
    ipaddress.IPv4Network(cidr) for cidr in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
)
# A link with more addresses than the largest private network is no link but a route, such as a VPN's 0.0.0.0/1.
SHORTEST_PREFIX = 8
# A message carries at most 253 descriptors (SCM_MAX_FD), and a socket filter at most 4096 instructions.
MAX_RULES = 200
MAX_FRAME_BYTES = 1 << 17
MAX_VERDICTS = 4096
# How much of a stream of frames is read at once.
CHUNK_BYTES = 1 << 16
_TCP = 6
_CARRIED = bytes((_TCP, 17, 1))  # TCP, UDP, ICMP
_SYN_RST_ACK = 0x16


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


def host_networks(fib_trie: str) -> tuple[tuple[ipaddress.IPv4Network, ...], tuple[ipaddress.IPv4Network, ...]]:
    """Reads the host's own and broadcast addresses, and the networks in which it has an address, to a prefix of 8 bits.

    Args:
        fib_trie: the text of /proc/net/fib_trie: an address on one line, `/LENGTH host LOCAL` on the lines below it.
    """
    own: set[ipaddress.IPv4Network] = set()
    linked: set[ipaddress.IPv4Network] = set()
    address = ""
    for line in fib_trie.splitlines():
        if match := re.match(r"\s*\|-- ([0-9.]+)$", line):
            address = match[1]
        elif match := re.match(r"\s*/([0-9]+) (\w+) (LOCAL|BROADCAST|UNICAST)\b", line):
            network = ipaddress.IPv4Network((address, int(match[1])), strict=False)
            if match[3] != "UNICAST":
                own.add(network)
            elif match[2] == "link":
                linked.add(network)
    near = (
        network
        for network in linked
        if network.prefixlen >= SHORTEST_PREFIX and any(address.subnet_of(network) for address in own)
    )
    return tuple(sorted(own)), tuple(sorted(near))


def sift(stream: bytes, passes: Callable[[bytes, int, int], bool]) -> tuple[bytes, bytes]:
    """Returns those whole frames of a stream that pass, and the part of a frame at its end.

    Args:
        stream: Ethernet frames, each preceded by its length in 4 bytes, big endian (QEMU's and passt's format).
        passes: judges the frame between two places of the stream.

    Raises:
        ValueError: a frame is longer than any that QEMU or passt sends, so the stream cannot be followed further.
    """
    # Frames that pass are mostly neighbours, and are copied together.
    passing, first, start = [], 0, 0
    while len(stream) - start >= 4:
        length = int.from_bytes(stream[start : start + 4], "big")
        if length > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {length} bytes")
        after = start + 4 + length
        if after > len(stream):
            break
        if not passes(stream, start + 4, after):
            passing.append(stream[first:start])
            first = after
        start = after
    passing.append(stream[first:start])
    return b"".join(passing), stream[start:]


def is_for_machine(stream: bytes, start: int, end: int) -> bool:
    """Judges passt's frame between `start` and `end`: no TCP segment without SYN, RST and ACK is for the machine.

    Debian 12's passt announces a window so, while a peer that is some way off has yet to acknowledge the machine's
    data. TCP ignores such segments (RFC 9293, 3.10.7.4). But conntrack finds them invalid, so where the machine
    forwards for a container it would not translate their address, and would reset the connection. Behind an allowlist
    all peers are local to passt, which then never sends them. passt carries no IPv6 here.
    """
    if end - start < 34 or stream[start + 12 : start + 14] != b"\x08\x00" or stream[start + 23] != _TCP:
        return True
    if stream[start + 20] & 0x1F or stream[start + 21]:  # a later fragment has no flags
        return True
    flags = start + 27 + (stream[start + 14] & 0xF) * 4
    return flags < end and bool(stream[flags] & _SYN_RST_ACK)


class FrameFilter:
    """Sorts what a machine with full internet sends: frames for passt, datagrams, and what is dropped.

    Only ARP passes, and IPv4 to permitted addresses: without options, in one piece, and TCP, UDP or ICMP.

    Args:
        take_datagram: takes each frame with UDP or ICMP; passt never sees those.
        opened: private networks that the machine may reach.
        refuse: takes each frame to an address that is denied.

    Attributes:
        denied: how many frames to denied addresses were dropped.
    """

    def __init__(
        self,
        take_datagram: Callable[[bytes], None],
        opened: Sequence[ipaddress.IPv4Network] = (),
        refuse: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        self._take_datagram = take_datagram
        self._opened = opened
        self._refuse = refuse
        self.denied = 0
        self._pending = b""
        self._verdicts: dict[bytes, bool] = {}
        self._denied: tuple[ipaddress.IPv4Network, ...] = NEVER
        self._private: tuple[ipaddress.IPv4Network, ...] = PRIVATE

    def deny(self, networks: Sequence[ipaddress.IPv4Network], near: Sequence[ipaddress.IPv4Network] = ()) -> None:
        """Replaces the networks that are denied in addition to NEVER, and those in addition to PRIVATE."""
        self._denied, self._private = (*NEVER, *networks), (*PRIVATE, *near)
        self._verdicts.clear()

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes of the machine's stream, and returns the frames that are now complete and are passt's.

        Raises:
            ValueError: a frame is longer than any that QEMU sends, so the stream cannot be followed further.
        """
        passing, self._pending = sift(self._pending + data, self._is_for_passt)
        return passing

    def _is_for_passt(self, stream: bytes, start: int, end: int) -> bool:
        """Judges the frame between `start` and `end`, and hands it over if it is a datagram."""
        if end - start < 34 or stream[start + 12 : start + 15] != b"\x08\x00\x45":
            return end - start >= 14 and stream[start + 12 : start + 14] == b"\x08\x06"
        protocol = stream[start + 23]
        if stream[start + 20] & 0x3F or stream[start + 21] or protocol not in _CARRIED:
            return False
        if not self._permits(stream[start + 30 : start + 34]):
            self._refuse(stream[start:end])
            return False
        if protocol != _TCP:
            self._take_datagram(stream[start:end])
        return protocol == _TCP

    def _permits(self, destination: bytes) -> bool:
        verdict = self._verdicts.get(destination)
        if verdict is None:
            if len(self._verdicts) >= MAX_VERDICTS:
                self._verdicts.clear()
            address = ipaddress.IPv4Address(destination)
            is_private = any(address in network for network in self._private)
            is_open = not is_private or any(address in network for network in self._opened)
            verdict = is_open and not any(address in network for network in self._denied)
            self._verdicts[destination] = verdict
        if not verdict:
            self.denied += 1
        return verdict


_LAYOUT = struct.Struct("<3Q")


@dataclass(frozen=True)
class Counts:
    """What a proxy has done so far.

    Args:
        denied: frames of the machine to addresses that no machine may reach; they were dropped.
        onward: connections to destinations of the allowlist.
        outside: connections whose other end is no destination of the allowlist. There must never be one.
    """

    denied: int = 0
    onward: int = 0
    outside: int = 0


class Counters:
    """The counters of this process.

    Args:
        path: the file; None keeps them in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._counts = Counts()
        if path is None:
            self._memory = mmap.mmap(-1, _LAYOUT.size)
            return
        with path.open("w+b") as file:
            file.write(bytes(_LAYOUT.size))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)

    def frames_denied(self, total: int) -> None:
        """Sets how many frames were dropped so far."""
        if total != self._counts.denied:
            self._keep(replace(self._counts, denied=total))

    def connected(self, *, is_allowed: bool) -> None:
        """Counts one connection onward."""
        before = self._counts
        self._keep(replace(before, onward=before.onward + is_allowed, outside=before.outside + (not is_allowed)))

    def _keep(self, counts: Counts) -> None:
        self._counts = counts
        _LAYOUT.pack_into(self._memory, 0, counts.denied, counts.onward, counts.outside)


def read(path: Path) -> Counts:
    """Reads the counters of a proxy.

    Raises:
        OSError: there are none.
        ValueError: the file does not hold counters.
    """
    with path.open("rb") as file:
        data = file.read(_LAYOUT.size + 1)
    if len(data) != _LAYOUT.size:
        raise ValueError(f"{path.name} holds no counters")
    return Counts(*_LAYOUT.unpack(data))


# The egress proxy counts there.
COUNTERS = "network.counters"


# Where the egress proxy reads the host's resolvers.
RESOLV_CONF, RESOLVERS = Path("/etc/resolv.conf"), "network.resolvers"

# Written by the controller: the private networks that the machine reaches.
OPENED = "private_networks"


def opened(directory: Path) -> list[str]:
    """Returns the private networks that a machine reaches; none if nothing says so."""
    try:
        return (directory / OPENED).read_text().split()
    except FileNotFoundError:
        return []


def start(theirs: socket.socket, allowed: list[dict[str, Any]] | None, private: Sequence[str]) -> None:
    """Starts the egress proxy on one end of a socket pair; `allowed` None means the whole internet, and `private`.

    It ends when QEMU closes the other end. Its pid is kept for `destroy` all the same.
    """
    arguments = ["--fd", str(theirs.fileno())]
    if allowed is None:
        arguments.append("--full-internet")
        for network in private:
            arguments += ["--private", network]
    for destination in allowed or ():
        arguments += ["--allow", f"{destination['cidr']}:{destination['port']}"]
    Path(RESOLVERS).touch()
    follow_resolvers(Path())
    with (
        Path("network.log").open("ab") as log,
        Path(COUNTERS).open("wb") as counters,
        Path(RESOLVERS).open("rb") as resolvers,
    ):
        for option, file in (("--counters", counters), ("--resolvers", resolvers)):
            arguments += [option, f"/proc/self/fd/{file.fileno()}"]
        _, pid = bubblewrap.start(
            enclosed(),
            [sys.executable, "-m", "provisioner.clouds.local.network.egress_proxy", *arguments],
            (theirs.fileno(), counters.fileno(), resolvers.fileno()),
            stdout=log, stderr=log,
        )  # fmt: skip
    Path("network.json").write_text(json.dumps({"pid": pid, "started": start_time(pid)}))


def enclosed() -> list[str]:
    """Returns the prefix that gives the egress proxy, and passt with it, a file system without any file of a user's."""
    return bubblewrap.command(
        sys.executable, readable=[*bubblewrap.PYTHON, *([Path(passt)] if (passt := shutil.which("passt")) else [])],
        # Until it becomes another user, root reads what only the owner of the Python may.
        capabilities=(*bubblewrap.BECOMES_ANOTHER_USER, "CAP_DAC_READ_SEARCH"),
        options=[*bubblewrap.PROCESSES, "--dir", "/tmp"],  # noqa: S108 - where passt makes its own root
    )  # fmt: skip


def follow_resolvers(directory: Path) -> None:
    """Copies what this host resolves names by to a machine's directory, for the egress proxy, if there is one."""
    with contextlib.suppress(OSError), (directory / RESOLVERS).open("r+b") as file:
        now = RESOLV_CONF.read_bytes()
        if file.read() != now:  # not replaced: the proxy has it open
            file.seek(0)
            file.write(now)
            file.truncate()


def start_program(module: str, *arguments: str, pass_fds: tuple[int, ...] = ()) -> int:
    """Starts one of our programs in the machine's directory, to outlive this one, and returns its pid."""
    argv = [sys.executable, "-m", module, *arguments]
    null = subprocess.DEVNULL
    return subprocess.Popen(
        argv, stdin=null, stdout=null, stderr=null, start_new_session=True, pass_fds=pass_fds,
        env=child_environment.for_python(os.environ),
    ).pid  # fmt: skip


def pid_of(directory: Path) -> int | None:
    """Returns the pid of the machine's egress proxy; None if it has ended."""
    try:
        process = json.loads((directory / "network.json").read_text())
    except (OSError, ValueError):
        return None
    return int(process["pid"]) if is_alive(process["pid"], process["started"]) else None
