"""Tests that captures keep whole packets alone, with their times set right."""

from __future__ import annotations

import struct

import pytest

from provisioner.recording import packets

HEADER = struct.pack("=IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 2048, 1)


def record(frame: bytes, seconds: int = 1_700_000_000) -> bytes:
    return struct.pack("=IIII", seconds, 250_000, len(frame), len(frame)) + frame


def test_times_are_set_right_by_that_of_the_last_packet() -> None:
    frames = [b"first", b"second"]
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
