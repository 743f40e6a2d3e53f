"""Tests reading and rewriting frames, and the checksums of rewritten ones."""

from __future__ import annotations

from ipaddress import IPv4Address

import pytest

from tests.aws.ec2 import packets
from tests.aws.ec2.network import TCP, UDP
from tests.aws.ec2.packets import ROUTER_MAC

pytestmark = pytest.mark.story

GUEST_MAC = bytes.fromhex("020000000001")
GUEST, FAR = IPv4Address("10.0.1.4"), IPv4Address("198.51.100.7")
SYN, SYN_ACK, ACK = 0x02, 0x12, 0x10


def checksum(data: bytes) -> int:
    """Returns the Internet checksum; 0 over data that contains its own."""
    total = sum(int.from_bytes(data[place : place + 2].ljust(2, b"\0"), "big") for place in range(0, len(data), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def has_right_checksums(frame: bytes) -> bool:
    """Returns whether the IPv4 and the TCP or UDP checksum of a frame are right."""
    body = frame[34:]
    pseudo = frame[26:34] + bytes([0, frame[23]]) + len(body).to_bytes(2, "big")
    return checksum(frame[14:34]) == 0 and checksum(pseudo + body) == 0


def frame_of(protocol: int, payload: bytes = b"", flags: int = SYN) -> bytes:
    """Returns a frame from the guest's port 40000 to the remote port 443."""
    ports = (40000).to_bytes(2, "big") + (443).to_bytes(2, "big")
    if protocol == TCP:
        body = ports + bytes.fromhex("0000000100000002") + bytes([0x50, flags]) + b"\x20\x00\0\0\0\0" + payload
    else:
        body = ports + (8 + len(payload)).to_bytes(2, "big") + b"\0\0" + payload
    at = 16 if protocol == TCP else 6
    pseudo = GUEST.packed + FAR.packed + bytes([0, protocol]) + len(body).to_bytes(2, "big")
    body = body[:at] + checksum(pseudo + body).to_bytes(2, "big") + body[at + 2 :]
    head = b"\x45\0" + (20 + len(body)).to_bytes(2, "big") + b"\x12\x34\x40\0\x40" + bytes([protocol]) + b"\0\0"
    head += GUEST.packed + FAR.packed
    head = head[:10] + checksum(head).to_bytes(2, "big") + head[12:]
    return ROUTER_MAC + GUEST_MAC + b"\x08\0" + head + body


@pytest.mark.parametrize("protocol", [TCP, UDP])
@pytest.mark.parametrize("payload", [b"", b"odd", b"even"])
def test_a_redirected_frame_has_right_addresses_and_checksums(protocol: int, payload: bytes) -> None:
    frame = frame_of(protocol, payload.ljust(20, b"x"))
    assert has_right_checksums(frame)
    changed = packets.redirected(frame, destination=(IPv4Address("10.0.1.1"), 8080))
    read = packets.read(changed)
    assert read is not None
    assert (read.source, read.source_port) == (GUEST, 40000)
    assert (read.destination, read.destination_port) == (IPv4Address("10.0.1.1"), 8080)
    assert has_right_checksums(changed)
    assert has_right_checksums(packets.redirected(frame, source=(IPv4Address("169.254.169.254"), 80)))


def test_only_a_syn_opens_a_tcp_connection() -> None:
    opens = {flags: packets.read(frame_of(TCP, flags=flags)) for flags in (SYN, SYN_ACK, ACK)}
    assert {flags: bool(packet and packet.opens) for flags, packet in opens.items()} == {
        SYN: True,
        SYN_ACK: False,
        ACK: False,
    }


def test_a_handshake_is_answered_for_the_client() -> None:
    frame = frame_of(TCP, flags=SYN_ACK)
    answer = packets.handshake_answer(frame)
    assert answer is not None
    assert has_right_checksums(answer)
    read = packets.read(answer)
    assert read is not None
    assert (read.source, read.source_port, read.destination, read.destination_port) == (FAR, 443, GUEST, 40000)
    assert int.from_bytes(answer[42:46], "big") == 2
    assert answer[:6] == GUEST_MAC
    assert packets.handshake_answer(frame_of(TCP, flags=ACK)) is None


def test_fragments_options_and_other_protocols_are_not_read() -> None:
    frame = frame_of(TCP, b"payload")
    assert packets.read(frame) is not None
    for at, value in ((12, 0x86), (14, 0x46), (20, 0x20), (21, 0x01), (23, 47)):
        changed = bytearray(frame)
        changed[at] = value
        assert packets.read(bytes(changed)) is None
    assert packets.read(frame[:40]) is None


def test_the_router_answers_for_every_other_address() -> None:
    request = b"\xff" * 6 + GUEST_MAC + b"\x08\x06" + bytes.fromhex("0001080006040001") + GUEST_MAC + GUEST.packed
    request += b"\0" * 6
    answer = packets.arp_answer(request + FAR.packed, GUEST)
    assert answer is not None
    assert answer[:12] == GUEST_MAC + ROUTER_MAC
    assert answer[20:22] == b"\0\x02"
    assert answer[22:] == ROUTER_MAC + FAR.packed + GUEST_MAC + GUEST.packed
    assert packets.arp_answer(request + GUEST.packed, GUEST) is None


def test_a_dhcp_answer_names_the_vpcs_resolver_alone() -> None:
    options = bytes([53, 1, 5, 0, 6, 8, 192, 0, 2, 1, 192, 0, 2, 2, 3, 4, 10, 0, 0, 1, 255])
    answer = packets.with_name_server(bytes(40) + b"\x12\x34" + bytes(240) + options, IPv4Address("10.0.0.2"))
    assert answer[42 + 240 :] == bytes([53, 1, 5, 0, 6, 8, 10, 0, 0, 2, 10, 0, 0, 2, 3, 4, 10, 0, 0, 1, 255])
    assert answer[40:42] == b"\0\0"
