"""Reads, answers and rewrites Ethernet frames as bytes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address

from tests.aws.ec2.network import ICMP, TCP, UDP

ROUTER_MAC = bytes.fromhex("02ec2a000001")
_ARP, _IPV4 = b"\x08\x06", b"\x08\x00"
_SYN, _ACK = 0x02, 0x10
# RFC 2131: the options begin after 236 bytes and a magic number, here behind the headers of Ethernet, IPv4 and UDP.
_DHCP_OPTIONS = 42 + 240
_PAD, _NAME_SERVERS, _END = 0, 6, 255


@dataclass(frozen=True)
class Packet:
    """Holds the relevant fields of an IPv4 packet.

    Args:
        source_port, destination_port: for ICMP, the echo's id and the type.
        opens: whether it is the first packet of a TCP connection; always true for other protocols.
    """

    protocol: int
    source: IPv4Address
    source_port: int
    destination: IPv4Address
    destination_port: int
    opens: bool


def read(frame: bytes) -> Packet | None:
    """Parses the packet in a frame; None if EC2 or this network drops it, as with fragments and IP options."""
    if len(frame) < 42 or frame[12:14] != _IPV4 or frame[14] != 0x45 or frame[20] & 0x3F or frame[21]:
        return None
    protocol = frame[23]
    source_port, destination_port = int.from_bytes(frame[34:36], "big"), int.from_bytes(frame[36:38], "big")
    opens = True
    if protocol == ICMP:
        source_port, destination_port = int.from_bytes(frame[38:40], "big"), frame[34]
    elif protocol == TCP:
        if len(frame) < 54:
            return None
        opens = frame[47] & (_SYN | _ACK) == _SYN
    elif protocol != UDP:
        return None
    source, destination = IPv4Address(frame[26:30]), IPv4Address(frame[30:34])
    return Packet(protocol, source, source_port, destination, destination_port, opens)


def arp_answer(frame: bytes, own: IPv4Address) -> bytes | None:
    """Returns the reply to an ARP request. The router answers for every address but the sender's own, as in a VPC."""
    if len(frame) < 42 or frame[12:14] != _ARP or frame[20:22] != b"\x00\x01" or frame[38:42] == own.packed:
        return None
    head = frame[6:12] + ROUTER_MAC + frame[12:20]
    return head + b"\x00\x02" + ROUTER_MAC + frame[38:42] + frame[22:28] + frame[28:32]


def handshake_answer(frame: bytes) -> bytes | None:
    """Returns the client's ACK to a server's SYN-ACK, or None for any other packet."""
    if frame[23] != TCP or frame[47] & (_SYN | _ACK) != _SYN | _ACK:
        return None
    acknowledged = (int.from_bytes(frame[38:42], "big") + 1) & 0xFFFFFFFF
    ports = frame[36:38] + frame[34:36]
    window = b"\x01\x00"
    segment = ports + frame[42:46] + acknowledged.to_bytes(4, "big") + bytes([0x50, _ACK]) + window + b"\0\0\0\0"
    ends = frame[30:34] + frame[26:30]
    checksum = _checksum(ends + b"\0\x06" + len(segment).to_bytes(2, "big") + segment)
    segment = segment[:16] + checksum + segment[18:]
    head = b"\x45\0\0\x28\0\0\x40\0\x40\x06\0\0" + ends
    head = head[:10] + _checksum(head) + head[12:]
    return frame[6:12] + ROUTER_MAC + _IPV4 + head + segment


def addressed(frame: bytes, mac: bytes) -> bytes:
    """Returns the frame as the router sends it to a network card."""
    return mac + ROUTER_MAC + frame[12:]


def redirected(
    frame: bytes, *, source: tuple[IPv4Address, int] | None = None, destination: tuple[IPv4Address, int] | None = None
) -> bytes:
    """Returns a TCP or UDP frame with another source or destination and updated checksums."""
    changed = bytearray(frame)
    for end, address_at, port_at in ((source, 26, 34), (destination, 30, 36)):
        if end:
            changed[address_at : address_at + 4] = end[0].packed
            changed[port_at : port_at + 2] = end[1].to_bytes(2, "big")
    _adjust(changed, 24, frame[26:34], changed[26:34])
    checksum_at = 50 if frame[23] == TCP else 40
    if frame[23] == TCP or frame[40:42] != b"\0\0":  # UDP may have no checksum
        _adjust(changed, checksum_at, frame[26:38], changed[26:38])
    return bytes(changed)


def with_name_server(frame: bytes, server: IPv4Address) -> bytes:
    """Returns a DHCP answer that names this name server instead of others (RFC 2132, option 6)."""
    changed = bytearray(frame)
    at = _DHCP_OPTIONS
    while at + 1 < len(frame) and frame[at] != _END:
        if frame[at] == _PAD:
            at += 1
            continue
        length = frame[at + 1]
        if frame[at] == _NAME_SERVERS:
            changed[at + 2 : at + 2 + length] = server.packed * (length // 4)
        at += 2 + length
    changed[40:42] = b"\0\0"  # no checksum, which UDP allows
    return bytes(changed)


def _adjust(frame: bytearray, at: int, old: bytes, new: bytes | bytearray) -> None:
    """Updates the checksum at an offset for words that changed (RFC 1624)."""
    total = ~int.from_bytes(frame[at : at + 2], "big") & 0xFFFF
    for place in range(0, len(old), 2):
        total += ~int.from_bytes(old[place : place + 2], "big") & 0xFFFF
        total += int.from_bytes(new[place : place + 2], "big")
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    frame[at : at + 2] = (~total & 0xFFFF).to_bytes(2, "big")


def _checksum(data: bytes) -> bytes:
    """Returns the Internet checksum of an even number of bytes (RFC 1071)."""
    total = sum(int.from_bytes(data[place : place + 2], "big") for place in range(0, len(data), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return (~total & 0xFFFF).to_bytes(2, "big")
