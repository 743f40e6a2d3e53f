"""Keeps whole packets of what QEMU captured of a machine's cards (libpcap's format), and sets their times right.

Pure. Packets are hostile, and none is looked into: what they are about, tshark says.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

# pcap-savefile(5). QEMU writes it in this host's byte order; the link type is Ethernet's.
_HEADER, _RECORD = struct.Struct("=IHHiIII"), struct.Struct("=IIII")
_MAGIC, _ETHERNET = 0xA1B2C3D4, 1
# How much is kept of what passes through one card.
LIMIT_BYTES = 16 << 20


class Packet(NamedTuple):
    """One packet of a capture: when it passed, and its frame, as much of it as was kept."""

    seconds: float
    frame: bytes


def whole(capture: bytes) -> bytes:
    """Returns a capture up to the end of its last whole packet; nothing if it is none."""
    end = _HEADER.size
    if len(capture) < end:
        return b""
    magic, _, _, _, _, most_bytes, kind = _HEADER.unpack_from(capture)
    if (magic, kind) != (_MAGIC, _ETHERNET):
        return b""
    while end + _RECORD.size <= len(capture):
        length = _RECORD.unpack_from(capture, end)[2]
        after = end + _RECORD.size + length
        if length > most_bytes or after > len(capture):
            break
        end = after
    return capture[:end]


def packets(capture: bytes) -> Iterator[Packet]:
    """Yields the packets of a capture that `whole` returned."""
    at = _HEADER.size
    while at < len(capture):
        seconds, microseconds, length, _ = _RECORD.unpack_from(capture, at)
        at += _RECORD.size
        yield Packet(seconds + microseconds / 1e6, capture[at : at + length])
        at += length


def set_right(capture: bytes, last_at: float) -> bytes:
    """Moves the times of a capture that `whole` returned, so that the last packet has its own.

    QEMU's times are too late by as long as the frozen machine, from which this one resumed, had run.

    Args:
        last_at: when the last packet was written, in seconds since the epoch.
    """
    last = max((packet.seconds for packet in packets(capture)), default=last_at)
    shift = round((last_at - last) * 1_000_000)
    moved, at = bytearray(capture), _HEADER.size
    while at < len(moved):
        seconds, microseconds, *lengths = _RECORD.unpack_from(moved, at)
        right = max(0, seconds * 1_000_000 + microseconds + shift)
        _RECORD.pack_into(moved, at, right // 1_000_000 & 0xFFFFFFFF, right % 1_000_000, *lengths)
        at += _RECORD.size + lengths[0]
    return bytes(moved)
