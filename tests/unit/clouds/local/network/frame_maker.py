"""Makes the frames that a machine sends, right and wrong ones, and reads the answers. For tests."""

from __future__ import annotations

import socket
import struct

from provisioner.clouds.local.network import egress

MAC = bytes.fromhex("525400000003")
GATEWAY_MAC = bytes.fromhex(egress.GATEWAY_MAC.replace(":", ""))


def checksum(data: bytes) -> int:
    """The Internet checksum, as RFC 1071 writes it down: 0 for data that includes its own."""
    data += bytes(len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ipv4(protocol: int, destination: str, payload: bytes, source: str = egress.GUEST_ADDRESS) -> bytes:
    """An Ethernet frame with an IPv4 packet."""
    ends = socket.inet_aton(source) + socket.inet_aton(destination)
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(payload), 1, 0x4000, 64, protocol, 0)
    header = header[:10] + struct.pack("!H", checksum(header + ends)) + ends
    return GATEWAY_MAC + MAC + b"\x08\x00" + header + payload


def udp(destination: str, port: int, source_port: int, data: bytes, source: str = egress.GUEST_ADDRESS) -> bytes:
    """A frame with a UDP datagram."""
    plain = struct.pack("!HHHH", source_port, port, 8 + len(data), 0) + data
    ends = socket.inet_aton(source) + socket.inet_aton(destination)
    summed = checksum(ends + struct.pack("!HH", 17, len(plain)) + plain)
    return ipv4(17, destination, plain[:6] + struct.pack("!H", summed) + plain[8:], source)


def ping(destination: str, identifier: int, data: bytes = b"") -> bytes:
    """A frame with an ICMP echo request."""
    plain = struct.pack("!BBHHH", 8, 0, 0, identifier, 1) + data
    return ipv4(1, destination, plain[:2] + struct.pack("!H", checksum(plain)) + plain[4:])


def framed(frame: bytes) -> bytes:
    """A frame in QEMU's stream."""
    return struct.pack("!I", len(frame)) + frame


def payload_of(frames: list[bytes]) -> bytes:
    """Checks the headers of one datagram's frames and puts its pieces together: UDP's or ICMP's header and data."""
    packet = b""
    for number, frame in enumerate(frames):
        assert frame[:14] == MAC + GATEWAY_MAC + b"\x08\x00"
        assert len(frame) <= 14 + 1500
        assert frame[14] == 0x45
        assert checksum(frame[14:34]) == 0
        assert int.from_bytes(frame[16:18], "big") == len(frame) - 14
        assert frame[30:34] == socket.inet_aton(egress.GUEST_ADDRESS)
        place = int.from_bytes(frame[20:22], "big")
        assert (place & 0x1FFF) * 8 == len(packet)
        assert bool(place & 0x2000) is (number < len(frames) - 1)
        packet += frame[34:]
    if frames[0][23] == 17:
        assert int.from_bytes(packet[4:6], "big") == len(packet)
        assert checksum(frames[0][26:34] + struct.pack("!HH", 17, len(packet)) + packet) == 0
    else:
        assert checksum(packet) == 0
    return packet
