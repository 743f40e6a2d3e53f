"""Reads captures of a machine's cards (libpcap's format): whole packets alone, and a table of what they were about.

Pure. Each packet is hostile, and nothing in it is believed but its place. A table never holds more than ROWS rows.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

# pcap-savefile(5). QEMU writes it in this host's byte order; the link type is Ethernet's.
_HEADER, _RECORD = struct.Struct("=IHHiIII"), struct.Struct("=IIII")
_MAGIC, _ETHERNET = 0xA1B2C3D4, 1
# How much is kept of what passes through one card.
LIMIT_BYTES = 16 << 20
ROWS = 5000
# Connections and questions that have no answer yet.
OPEN = 20_000
_TCP, _UDP, _DNS = 6, 17, 53
_SYN, _RST, _ACK = 0x02, 0x04, 0x10
# IANA, "Domain Name System (DNS) Parameters": the common types, and the response codes.
_TYPES = {1: "A", 2: "NS", 5: "CNAME", 6: "SOA", 12: "PTR", 15: "MX", 16: "TXT", 28: "AAAA", 33: "SRV", 65: "HTTPS"}
_CODES = {0: "NOERROR", 1: "FORMERR", 2: "SERVFAIL", 3: "NXDOMAIN", 4: "NOTIMP", 5: "REFUSED"}
NO_ANSWER = "no answer"


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


class _Row:
    """One row of the table: what has the same ends and the same result is counted in one."""

    def __init__(self, seconds: float, facts: dict[str, Any]) -> None:
        self.seconds = seconds
        self.facts = facts
        self.result = NO_ANSWER


def table(capture: bytes) -> list[dict[str, Any]]:
    """Returns what a capture says of DNS (over UDP) and of TCP connections, in the order of the first of each kind.

    IPv4 only. A connection is `connected`, `refused`, or has `no answer`: a frame that the machine's egress proxy has
    dropped has none. More than ROWS different rows, or OPEN without an answer at a time, end in a row `left_out`.
    """
    rows: list[_Row] = []
    open_rows: dict[tuple[object, ...], _Row] = {}
    left_out = 0
    for seconds, frame in packets(capture):
        if (seen := _seen(frame)) is None:
            continue
        key, facts, result = seen
        row = open_rows.get(key)
        if facts is None:
            if row:
                row.result = result
                del open_rows[key]
        elif row is None:
            if len(open_rows) >= OPEN or len(rows) >= OPEN:
                left_out += 1
                continue
            row = open_rows[key] = _Row(seconds, facts)
            rows.append(row)
    return _counted(rows, left_out)


def _counted(rows: list[_Row], left_out: int) -> list[dict[str, Any]]:
    counted: dict[tuple[object, ...], dict[str, Any]] = {}
    for row in rows:
        key = (*row.facts.values(), row.result)
        if key in counted:
            counted[key]["count"] += 1
        elif len(counted) < ROWS:
            at = datetime.fromtimestamp(row.seconds, UTC).isoformat(timespec="milliseconds")
            counted[key] = {"at": at, **row.facts, "result": row.result, "count": 1}
        else:
            left_out += 1
    return [*counted.values(), *([{"left_out": left_out}] if left_out else [])]


def _seen(frame: bytes) -> tuple[tuple[object, ...], dict[str, Any] | None, str] | None:
    """Returns what a frame asks for, under the key by which its answer is known; an answer has no facts."""
    if len(frame) < 34 or frame[12:14] != b"\x08\x00" or frame[14] >> 4 != 4:
        return None
    start = 14 + (frame[14] & 0xF) * 4
    if start < 34 or frame[20] & 0x1F or frame[21] or len(frame) < start + 20 - 12 * (frame[23] == _UDP):
        return None  # a later fragment, or too little of it
    source, target = frame[26:30], frame[30:34]
    port, target_port = struct.unpack_from("!HH", frame, start)
    if frame[23] == _TCP:
        return _connection(source, port, target, target_port, frame[start + 13])
    if frame[23] == _UDP and _DNS in (port, target_port):
        return _question(source, port, target, target_port, frame[start + 8 :])
    return None


def _connection(
    source: bytes, port: int, target: bytes, target_port: int, flags: int
) -> tuple[tuple[object, ...], dict[str, Any] | None, str] | None:
    there, back = (_TCP, source, port, target, target_port), (_TCP, target, target_port, source, port)
    if flags & (_SYN | _ACK | _RST) == _SYN:
        facts = {"kind": "tcp", "from": _address(source), "to": _address(target), "port": target_port}
        return there, facts, ""
    if flags & (_SYN | _ACK) == _SYN | _ACK:
        return back, None, "connected"
    return (back, None, "refused") if flags & _RST else None


def _question(
    source: bytes, port: int, target: bytes, target_port: int, message: bytes
) -> tuple[tuple[object, ...], dict[str, Any] | None, str] | None:
    if len(message) < 12:
        return None
    number, flags, questions = struct.unpack_from("!HHH", message)
    if flags & 0x8000:
        code = flags & 0xF
        return (_UDP, target, target_port, number), None, _CODES.get(code, f"RCODE{code}")
    if target_port != _DNS or not questions or (asked := _name(message)) is None:
        return None
    name, end = asked
    [kind] = struct.unpack_from("!H", message, end)
    facts = {
        "kind": "dns",
        "from": _address(source),
        "to": _address(target),
        "name": name,
        "type": _TYPES.get(kind, f"TYPE{kind}"),
    }
    return (_UDP, source, port, number), facts, ""


def _name(message: bytes) -> tuple[str, int] | None:
    """Reads the first question's name, with what is unusual in it as `\\DDD` (RFC 4343), and where it ends."""
    labels: list[str] = []
    at = 12
    while at + 3 <= len(message) and at < 12 + 255:
        length = message[at]
        if length == 0:
            return ".".join(labels) or ".", at + 1
        if length > 63:
            return None
        label = message[at + 1 : at + 1 + length]
        labels.append("".join(chr(c) if 0x21 <= c < 0x7F and c not in b".\\" else f"\\{c:03d}" for c in label))
        at += 1 + length
    return None


def _address(address: bytes) -> str:
    return socket.inet_ntoa(address)
