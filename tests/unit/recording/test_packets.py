"""Tests what is read from captures: whole packets, and the table of DNS and connections."""

from __future__ import annotations

import socket
import struct

import pytest

from provisioner.recording import packets

HEADER = struct.pack("=IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 2048, 1)
GUEST, PEER = "10.0.3.15", "192.0.2.7"
SYN, SYN_ACK, RST = 0x02, 0x12, 0x14


def record(frame: bytes, seconds: int = 1_700_000_000) -> bytes:
    return struct.pack("=IIII", seconds, 250_000, len(frame), len(frame)) + frame


def ip(source: str, target: str, protocol: int, payload: bytes) -> bytes:
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(payload), 1, 0, 64, protocol, 0)
    return b"\0" * 12 + b"\x08\x00" + header + socket.inet_aton(source) + socket.inet_aton(target) + payload


def tcp(source: str, port: int, target: str, target_port: int, flags: int) -> bytes:
    return ip(source, target, 6, struct.pack("!HHIIBBHHH", port, target_port, 0, 0, 0x50, flags, 0, 0, 0))


def dns(source: str, port: int, target: str, target_port: int, *, flags: int = 0x0100, name: bytes = b"") -> bytes:
    message = struct.pack("!HHHHHH", 77, flags, 1, 0, 0, 0) + name + struct.pack("!HH", 28, 1)
    return ip(source, target, 17, struct.pack("!HHHH", port, target_port, 8 + len(message), 0) + message)


def table(*frames: bytes) -> list[dict[str, object]]:
    capture = HEADER + b"".join(record(frame) for frame in frames)
    assert packets.whole(capture) == capture
    return [{name: value for name, value in row.items() if name != "at"} for row in packets.table(capture)]


def test_connections_are_connected_refused_or_without_an_answer() -> None:
    rows = table(
        tcp(GUEST, 1000, PEER, 443, SYN),
        tcp(PEER, 443, GUEST, 1000, SYN_ACK),
        tcp(GUEST, 1001, PEER, 22, SYN),
        tcp(GUEST, 1001, PEER, 22, SYN),  # sent again
        tcp(PEER, 22, GUEST, 1001, RST),
        tcp(GUEST, 1002, PEER, 22, SYN),
        tcp(PEER, 22, GUEST, 1002, RST),
        tcp(GUEST, 1003, "169.254.169.254", 80, SYN),
        tcp(PEER, 443, GUEST, 1000, RST),  # long after it was connected
    )
    common = {"kind": "tcp", "from": GUEST}
    assert rows == [
        {**common, "to": PEER, "port": 443, "result": "connected", "count": 1},
        {**common, "to": PEER, "port": 22, "result": "refused", "count": 2},
        {**common, "to": "169.254.169.254", "port": 80, "result": "no answer", "count": 1},
    ]


def test_questions_show_their_code_and_unusual_names() -> None:
    name, odd = b"\x07example\x03com\x00", b"\x06a.b\x1b[m\x00"
    rows = table(
        dns(GUEST, 5000, "198.51.100.53", 53, name=name),
        dns("198.51.100.53", 53, GUEST, 5000, flags=0x8183, name=name),
        dns(GUEST, 5001, "198.51.100.53", 53, name=odd),
    )
    assert [(row["name"], row["type"], row["result"]) for row in rows] == [
        ("example.com", "AAAA", "NXDOMAIN"),
        ("a\\046b\\027[m", "AAAA", "no answer"),
    ]


def test_the_time_is_that_of_the_first_packet() -> None:
    [row] = packets.table(HEADER + record(tcp(GUEST, 1, PEER, 2, SYN)))
    assert row["at"] == "2023-11-14T22:13:20.250+00:00"


def test_times_are_set_right_by_that_of_the_last_packet() -> None:
    frames = [tcp(GUEST, 1, PEER, port, SYN) for port in (1, 2)]
    capture = HEADER + record(frames[0], 1_700_000_000) + record(frames[1], 1_700_000_010)
    moved = packets.set_right(capture, 1_699_999_970.5)
    assert [(packet.seconds, packet.frame) for packet in packets.packets(moved)] == [
        (1_699_999_960.5, frames[0]),
        (1_699_999_970.5, frames[1]),
    ]
    assert packets.whole(moved) == moved
    assert packets.set_right(HEADER, 5) == HEADER
    assert packets.set_right(b"", 5) == b""
    assert next(packets.packets(packets.set_right(HEADER + record(b"x", 0), 2**33))).seconds == 0


@pytest.mark.parametrize(
    ("capture", "kept"),
    [
        (b"", b""),
        (HEADER[:10], b""),
        (b"\0" * 24, b""),
        (HEADER, HEADER),
        (HEADER + record(b"x" * 60)[:-1], HEADER),
        (HEADER + record(b"x" * 60) + b"\0" * 7, HEADER + record(b"x" * 60)),
        (HEADER + struct.pack("=IIII", 0, 0, 2**32 - 1, 0) + b"x" * 100, HEADER),
        (HEADER + struct.pack("=IIII", 0, 0, 2049, 0) + b"x" * 3000, HEADER),
    ],
    ids=["empty", "short", "zeros", "none", "cut", "rest", "huge", "too-long"],
)
def test_only_whole_packets_are_kept(capture: bytes, kept: bytes) -> None:
    assert packets.whole(capture) == kept


def test_a_scan_of_all_ports_leaves_a_bounded_table() -> None:
    frames = (tcp(GUEST, 1000, PEER, port, SYN) for port in range(1, 60_000))
    *rows, last = table(*frames)
    assert len(rows) == packets.ROWS
    assert last == {"left_out": 60_000 - 1 - packets.ROWS}
