"""The frames of UDP datagrams and pings: what is read from a hostile machine's, and what it is answered with."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.clouds.local.network import datagrams
from provisioner.clouds.local.network.datagrams import Datagram, Flow
from tests.unit.clouds.local.network import frame_maker
from tests.unit.clouds.local.network.frame_maker import MAC, payload_of, udp

PEER = "203.0.113.7"
FLOW = Flow(datagrams.UDP, 4000, socket.inet_aton(PEER), 53)
GOOD = udp(PEER, 53, 4000, b"question")


def changed(start: int, replacement: bytes) -> bytes:
    return GOOD[:start] + replacement + GOOD[start + len(replacement) :]


def test_a_datagram_is_read() -> None:
    assert datagrams.parse(GOOD) == Datagram(FLOW, MAC, b"question")
    assert datagrams.parse(GOOD + bytes(18)) == Datagram(FLOW, MAC, b"question")  # Ethernet pads short frames
    assert datagrams.parse(udp(PEER, 53, 4000, b"")) == Datagram(FLOW, MAC, b"")


def test_a_ping_is_read_with_its_header() -> None:
    datagram = datagrams.parse(frame_maker.ping(PEER, 77, b"data"))
    assert datagram is not None
    assert datagram.flow == Flow(datagrams.ICMP, 77, socket.inet_aton(PEER), 0)
    assert datagram.payload[:2] == b"\x08\x00"
    assert datagram.payload[4:] == struct.pack("!HH", 77, 1) + b"data"


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        GOOD[:41],
        changed(12, b"\x86\xdd"),
        changed(14, b"\x46"),
        changed(14, b"\x65"),
        changed(16, b"\x00\x1b"),
        changed(16, struct.pack("!H", len(GOOD) - 14 + 1)),
        changed(16, b"\xff\xff"),
        changed(20, b"\x20\x00"),
        changed(20, b"\x00\x01"),
        changed(23, b"\x06"),
        changed(23, b"\x01"),
        changed(38, struct.pack("!H", 7)),
        changed(38, struct.pack("!H", 17)),
        changed(34, b"\0\0"),
        changed(36, b"\0\0"),
        udp(PEER, 53, 4000, b"question", source="192.0.2.66"),
    ],
    ids=[
        *("empty", "short", "ipv6", "options", "version", "total-small", "total-large", "total-huge"),
        *("first-fragment", "later-fragment", "tcp", "no-echo", "length-small", "length-large"),
        *("source-port", "port", "other-source"),
    ],
)
def test_a_frame_that_is_not_exactly_right_is_no_datagram(frame: bytes) -> None:
    assert datagrams.parse(frame) is None


@given(st.binary(max_size=200))
def test_no_frame_breaks_the_parser(frame: bytes) -> None:
    datagrams.parse(frame)


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=8))
def test_what_a_broken_frame_carries_lies_within_it(changes: list[tuple[int, int]]) -> None:
    frame = bytearray(GOOD)
    for place, value in changes:
        frame[place] = value
    datagram = datagrams.parse(bytes(frame))
    assert datagram is None or datagram.payload in bytes(frame)


@given(st.binary(max_size=5000), st.integers(0, 1 << 40))
def test_an_answer_comes_in_frames_of_the_cards_size(data: bytes, identification: int) -> None:
    frames = datagrams.frames(FLOW, MAC, data, identification)
    assert payload_of(frames)[8:] == data
    assert payload_of(frames)[:4] == struct.pack("!HH", 53, 4000)
    assert {frame[18:20] for frame in frames} == {struct.pack("!H", identification & 0xFFFF)}


def test_the_largest_datagram_is_answered() -> None:
    frames = datagrams.frames(FLOW, MAC, bytes(65_507), 1)
    assert len(payload_of(frames)) == 65_515


def test_a_ping_is_answered_with_the_machines_identifier() -> None:
    flow = Flow(datagrams.ICMP, 77, socket.inet_aton(PEER), 0)
    reply = struct.pack("!BBHHH", 0, 0, 0xABCD, 999, 1) + b"data"
    assert payload_of(datagrams.frames(flow, MAC, reply, 1))[4:] == struct.pack("!HH", 77, 1) + b"data"
    for other in (b"", reply[:7], b"\x03" + reply[1:]):
        assert datagrams.frames(flow, MAC, other, 1) == []
