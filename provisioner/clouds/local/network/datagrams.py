"""Parses and builds the frames of a machine's UDP datagrams and pings, and carries them: one socket for each flow.

Also chooses which of the host's DNS resolvers answers a machine: the first, until it falls silent.

Standard library only.

The machine is hostile: it may send any frame. A frame that is not exactly right is no datagram.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from provisioner.clouds.local.network.egress import GATEWAY, GATEWAY_MAC, GUEST_ADDRESS, RESOLVER

# IANA "Assigned Internet Protocol Numbers"; RFC 792.
ICMP, UDP = 1, 17
ECHO_REQUEST, ECHO_REPLY = 8, 0
# Destination unreachable, communication administratively prohibited (RFC 1812, 5.2.7.1).
_PROHIBITED = b"\x03\x0d"
_FIRST_OF_MANY = 224
# The machine's card has Ethernet's usual MTU.
MTU = 1500
_PIECE = (MTU - 20) // 8 * 8
_MORE_FRAGMENTS, _DO_NOT_FRAGMENT = 0x2000, 0x4000
_ETHERNET, _HEADERS = 14, 34
_GUEST = socket.inet_aton(GUEST_ADDRESS)
_GATEWAY_MAC = bytes.fromhex(GATEWAY_MAC.replace(":", ""))


class Flow(NamedTuple):
    """The two ends of a conversation, as the machine sees them.

    Args:
        protocol: UDP or ICMP.
        port: the machine's port; for pings their identifier.
        peer: the other end's IPv4 address, 4 bytes.
        peer_port: the other end's port; 0 for pings.
    """

    protocol: int
    port: int
    peer: bytes
    peer_port: int


class Datagram(NamedTuple):
    """What one frame of a machine carries.

    Args:
        mac: the machine's hardware address.
        payload: UDP's data; for a ping the whole ICMP message.
    """

    flow: Flow
    mac: bytes
    payload: bytes


def parse(frame: bytes) -> Datagram | None:
    """Returns the UDP datagram or ping of a frame; None if it holds none, or anything in it is wrong.

    IPv4 without options and in one piece, from the machine's own address. Checksums are not verified: nothing between
    QEMU and here can damage a frame, and the datagram gets a new one.
    """
    if len(frame) < _HEADERS + 8 or frame[12:15] != b"\x08\x00\x45" or frame[26:30] != _GUEST:
        return None
    if frame[20] & 0x3F or frame[21]:  # a fragment
        return None
    end = _ETHERNET + (frame[16] << 8 | frame[17])
    if not _HEADERS + 8 <= end <= len(frame):
        return None
    protocol, mac, peer = frame[23], frame[6:12], frame[30:34]
    if protocol == UDP:
        port, peer_port, length = struct.unpack_from("!HHH", frame, _HEADERS)
        if not port or not peer_port or not 8 <= length <= end - _HEADERS:
            return None
        return Datagram(Flow(UDP, port, peer, peer_port), mac, frame[_HEADERS + 8 : _HEADERS + length])
    if protocol == ICMP and frame[_HEADERS] == ECHO_REQUEST and frame[_HEADERS + 1] == 0:
        [identifier] = struct.unpack_from("!H", frame, _HEADERS + 4)
        return Datagram(Flow(ICMP, identifier, peer, 0), mac, frame[_HEADERS:end])
    return None


def frames(flow: Flow, mac: bytes, payload: bytes, identification: int) -> list[bytes]:
    """Builds the frames that bring a peer's answer to the machine.

    Args:
        flow: the conversation. The answer comes from its peer.
        mac: the machine's hardware address.
        payload: UDP's data, or an ICMP message with any identifier; one that is no echo reply gives no frames.
        identification: a number that differs from that of other recent datagrams, modulo 65536.
    """
    packet = _udp(flow, payload) if flow.protocol == UDP else _echo_reply(flow, payload)
    ethernet = mac + _GATEWAY_MAC + b"\x08\x00"
    built = []
    for start in range(0, len(packet), _PIECE):
        piece = packet[start : start + _PIECE]
        more = _MORE_FRAGMENTS if start + _PIECE < len(packet) else 0
        place = more | start // 8 if len(packet) > _PIECE else _DO_NOT_FRAGMENT
        header = struct.pack("!BBHHHBB", 0x45, 0, 20 + len(piece), identification & 0xFFFF, place, 64, flow.protocol)
        ends = flow.peer + _GUEST
        built.append(ethernet + header + _checksum(header + ends) + ends + piece)
    return built


def refuse(frame: bytes, answer: Callable[[bytes], None]) -> None:
    """Tells a machine that it may not reach where its frame should go: it need not wait in vain.

    There is no such answer to an answer, or to what is for many (RFC 1122, 3.2.2).

    Args:
        frame: an IPv4 packet without options.
        answer: takes the frame for the machine.
    """
    is_request = frame[23] != ICMP or frame[_HEADERS : _HEADERS + 1] == bytes([ECHO_REQUEST])
    if frame[26:30] != _GUEST or not is_request or frame[30] >= _FIRST_OF_MANY:
        return
    message = _PROHIBITED + bytes(6) + frame[_ETHERNET : _HEADERS + 8]
    message = _PROHIBITED + _checksum(message) + message[4:]
    header = struct.pack("!BBHHHBB", 0x45, 0, 20 + len(message), 0, _DO_NOT_FRAGMENT, 64, ICMP)
    ends = socket.inet_aton(GATEWAY) + _GUEST
    answer(frame[6:12] + _GATEWAY_MAC + b"\x08\x00" + header + _checksum(header + ends) + ends + message)


def _udp(flow: Flow, payload: bytes) -> bytes:
    ports_and_length = struct.pack("!HHH", flow.peer_port, flow.port, 8 + len(payload))
    pseudo_header = flow.peer + _GUEST + struct.pack("!HH", UDP, 8 + len(payload))
    return ports_and_length + _checksum(pseudo_header + ports_and_length + b"\0\0" + payload) + payload


def _echo_reply(flow: Flow, message: bytes) -> bytes:
    if len(message) < 8 or message[0] != ECHO_REPLY:
        return b""
    identifier_and_rest = struct.pack("!H", flow.port) + message[6:]
    return message[:2] + _checksum(message[:2] + identifier_and_rest) + identifier_and_rest


def _checksum(data: bytes) -> bytes:
    """The Internet checksum (RFC 1071) of data whose own checksum field is left out or zero; never zero itself.

    2**16 is 1 modulo 65535, so the sum of the 16-bit words is the number that all bytes together are.
    """
    padded = data + b"\0" if len(data) % 2 else data
    return (0xFFFF - int.from_bytes(padded, "big") % 0xFFFF).to_bytes(2, "big")


# A hundred machines leave the host some of its 28,232 ephemeral ports (ip(7), ip_local_port_range).
MAX_FLOWS = 256
# Linux remembers a UDP flow or a ping for 30 seconds after its last datagram (nf_conntrack_udp_timeout), and one whose
# peer goes on answering for 120. It has room for 262,144 unless memory is short (nf_conntrack_max). A machine that
# opens all that it may takes 2000 of them, or 6500 with such a peer. An honest one that looks up each name anew, as a
# crawler does, begins some tens per second.
NEW_FLOWS_PER_SECOND = 50
NEW_FLOWS_AT_ONCE = 500
# RFC 4787, REQ-5: a mapping must not expire in less than two minutes.
IDLE_SECONDS = 120.0
EXPIRY_SECONDS = 5.0
MAX_DATAGRAM_BYTES = 1 << 16
# Other flows and TCP have their turn after so many answers.
ANSWERS_AT_ONCE = 32
DNS_PORT = 53
_RESOLVER = socket.inet_aton(RESOLVER)
# linux/in.h. Larger datagrams leave in fragments: the machine would never learn of a smaller path MTU.
_IP_MTU_DISCOVER, _IP_PMTUDISC_DONT = 10, 0


@dataclass
class _Open:
    """An open flow."""

    connected: socket.socket
    peer: object  # as recvfrom names it
    mac: bytes
    used: float


class DatagramFlows:
    """Sends what a machine's frames carry, and returns the answers as frames.

    Args:
        answer: takes each frame for the machine.
        resolvers: the servers that answer DNS.
    """

    def __init__(self, answer: Callable[[bytes], None], resolvers: Resolvers) -> None:
        self._answer = answer
        self._resolvers = resolvers
        self._loop = asyncio.get_running_loop()
        self._flows: OrderedDict[Flow, _Open] = OrderedDict()  # the one that was silent longest comes first
        self._tokens = float(NEW_FLOWS_AT_ONCE)
        self._refilled_at = self._loop.time()
        self._identification = 0

    def forward(self, frame: bytes) -> None:
        """Sends a frame's datagram on. Like any network, drops what it cannot send."""
        datagram = parse(frame)
        if datagram is None:
            return
        flow = self._flows.get(datagram.flow)
        try:
            if flow is None:
                if not self._takes_token():
                    return
                flow = self._open(datagram.flow, datagram.mac)
            flow.used = self._loop.time()
            self._flows.move_to_end(datagram.flow)
            flow.connected.send(datagram.payload)
        except OSError:  # unreachable, refused before, full, or no permission for pings
            return

    def _takes_token(self) -> bool:
        """Returns whether a new flow may begin now, by a token bucket; if so, takes a token."""
        at = self._loop.time()
        refilled = self._tokens + (at - self._refilled_at) * NEW_FLOWS_PER_SECOND
        self._tokens, self._refilled_at = min(refilled, NEW_FLOWS_AT_ONCE), at
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def _open(self, flow: Flow, mac: bytes) -> _Open:
        """Connects a socket to the flow's peer."""
        if len(self._flows) >= MAX_FLOWS:
            self._close(next(iter(self._flows)))
        address, port = self._destination(flow)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        protocol = socket.IPPROTO_ICMP if flow.protocol == ICMP else socket.IPPROTO_UDP
        connected = socket.socket(family, socket.SOCK_DGRAM, protocol)
        try:
            connected.setblocking(False)
            if family == socket.AF_INET:
                connected.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_DONT)
            connected.connect((address, port))
            peer = (address, 0) if flow.protocol == ICMP else connected.getpeername()
        except OSError:
            connected.close()
            raise
        self._flows[flow] = _Open(connected, peer, mac, self._loop.time())
        self._loop.add_reader(connected, self._receive, flow)
        return self._flows[flow]

    def _destination(self, flow: Flow) -> tuple[str, int]:
        if flow.peer != _RESOLVER:
            return socket.inet_ntoa(flow.peer), flow.peer_port
        if flow.peer_port != DNS_PORT:
            raise ConnectionRefusedError("the resolver answers DNS only")
        return self._resolvers.choose(self._loop.time()), DNS_PORT

    def _receive(self, flow: Flow) -> None:
        opened = self._flows[flow]
        for _ in range(ANSWERS_AT_ONCE):
            try:
                # A datagram from elsewhere may arrive in the instant in which the socket has a port and no peer yet.
                payload, source = opened.connected.recvfrom(MAX_DATAGRAM_BYTES)
                if source != opened.peer:
                    continue
            except OSError:  # nothing more, or the peer refused what was sent
                return
            if flow.peer == _RESOLVER:
                self._resolvers.answered()
            self._identification += 1
            for frame in frames(flow, opened.mac, payload, self._identification):
                self._answer(frame)

    def _close(self, flow: Flow) -> None:
        connected = self._flows.pop(flow).connected
        self._loop.remove_reader(connected)
        connected.close()

    async def expire(self) -> None:
        """Ends flows in which the machine has sent nothing for long; all of them when it is cancelled."""
        try:
            while True:
                await asyncio.sleep(EXPIRY_SECONDS)
                oldest = self._loop.time() - IDLE_SECONDS
                for flow in [flow for flow, opened in self._flows.items() if opened.used < oldest]:
                    self._close(flow)
        finally:
            for flow in list(self._flows):
                self._close(flow)


# glibc asks again after 5 seconds (resolv.conf(5), "timeout"); by then another resolver should be asked.
SILENCE_SECONDS = 4.0
# resolv.conf(5): further name servers are ignored.
MAX_RESOLVERS = 3


def parse_resolv_conf(text: str) -> tuple[str, ...]:
    """Reads the addresses of the name servers; 127.0.0.1, resolv.conf's default, if there are none."""
    addresses = []
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["nameserver"] and len(words) > 1:
            with contextlib.suppress(ValueError):
                addresses.append(str(ipaddress.ip_address(words[1])))
    return tuple(addresses[:MAX_RESOLVERS]) or ("127.0.0.1",)


class Resolvers:
    """Remembers which resolver is asked, and since when it has owed an answer."""

    def __init__(self) -> None:
        """Starts with resolv.conf's default."""
        self._addresses: tuple[str, ...] = ("127.0.0.1",)
        self._chosen = 0
        self._silent_since: float | None = None

    def replace(self, addresses: Sequence[str]) -> None:
        """Takes the host's present resolvers."""
        if tuple(addresses) != self._addresses:
            self._addresses, self._chosen, self._silent_since = tuple(addresses), 0, None

    def choose(self, at: float) -> str:
        """Returns the address to ask.

        Args:
            at: the time, in monotonic seconds.
        """
        if self._silent_since is None:
            self._silent_since = at
        elif at - self._silent_since > SILENCE_SECONDS:
            self._chosen, self._silent_since = self._chosen + 1, at
        return self._addresses[self._chosen % len(self._addresses)]

    def answered(self) -> None:
        """Notes that the chosen resolver has answered."""
        self._silent_since = None
