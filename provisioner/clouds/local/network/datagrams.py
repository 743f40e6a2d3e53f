"""Parses and builds the Ethernet frames of a machine's UDP datagrams and pings. Pure; standard library only.

The machine is hostile: it may send any frame. A frame that is not exactly right is no datagram.
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

from provisioner.clouds.local.network.egress_rules import GATEWAY_MAC, GUEST_ADDRESS

# IANA "Assigned Internet Protocol Numbers"; RFC 792.
ICMP, UDP = 1, 17
ECHO_REQUEST, ECHO_REPLY = 8, 0
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
