"""The egress proxy's decisions and counters: what an allowlist entry may be and covers, and which frames may pass."""

from __future__ import annotations

import ipaddress
import struct
from pathlib import Path

import pytest

from provisioner.clouds.local.network import egress
from provisioner.clouds.local.network.egress import Counters, Counts, read
from tests.unit.clouds.local.network.frame_maker import framed


@pytest.mark.parametrize(
    ("text", "network", "port"),
    [
        ("203.0.113.7/32:443", "203.0.113.7/32", 443),
        ("203.0.113.7:443", "203.0.113.7/32", 443),
        ("198.51.100.0/24:65535", "198.51.100.0/24", 65535),
        ("10.0.0.0/8:1", "10.0.0.0/8", 1),
    ],
)
def test_an_allowlist_entry_is_a_network_and_a_port(text: str, network: str, port: int) -> None:
    assert egress.parse_allow(text) == egress.Rule(ipaddress.IPv4Network(network), port)


@pytest.mark.parametrize(
    "text",
    [
        *("", "203.0.113.7", "203.0.113.7/32:", "203.0.113.7/32:0", "203.0.113.7/32:65536", "203.0.113.7/32:443x"),
        *("203.0.113.7/32:-1", "203.0.113.7/32: 443", "203.0.113.7/32:٤", "203.0.113.7/32:443\n"),
        *("203.0.113.7/24:443", "203.0.113.7/33:443", "203.0.113.0/255.255.255.0:443"),
        *("example.org:443", "[2001:db8::1]:443"),
        *("127.0.0.1/32:80", "127.5.0.0/16:80", "0.0.0.0/0:443", "0.0.0.0/32:443", "64.0.0.0/2:443"),
        *("169.254.169.254/32:80", "100.100.100.200/32:80", "100.64.0.0/10:80", "168.63.129.16/32:32526"),
        *("192.0.0.192/32:80", "224.0.0.1/32:80", "255.255.255.255/32:80"),
    ],
)
def test_an_entry_that_touches_the_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        egress.parse_allow(text)


@pytest.mark.parametrize(
    ("address", "port", "allowed"),
    [
        ("203.0.113.7", 443, True),
        ("203.0.113.7", 8443, False),
        ("203.0.113.8", 443, False),
        ("198.51.100.0", 8443, True),
        ("198.51.100.255", 8443, True),
        ("198.51.101.0", 8443, False),
        ("198.51.100.9", 443, False),
    ],
)
def test_a_port_is_allowed_for_its_own_network_only(address: str, port: int, allowed: bool) -> None:
    rules = [egress.parse_allow("203.0.113.7/32:443"), egress.parse_allow("198.51.100.0/24:8443")]
    assert egress.allows(rules, address, port) is allowed


def test_the_hosts_addresses_and_networks_are_read_from_the_kernels_table() -> None:
    table = """Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 127.0.0.0/8 2 0 2
        |-- 127.0.0.0
           /8 host LOCAL
     |-- 192.0.2.2
        /32 host LOCAL
     |-- 192.0.2.255
        /32 link BROADCAST
     |-- 192.0.2.0
        /24 link UNICAST
     |-- 198.51.100.0
        /24 universe UNICAST
     |-- 203.0.113.0
        /24 link UNICAST
     |-- 128.0.0.0
        /1 link UNICAST
"""
    own, near = egress.host_networks(table)
    assert list(map(str, own)) == ["127.0.0.0/8", "192.0.2.2/32", "192.0.2.255/32"]
    assert list(map(str, near)) == ["192.0.2.0/24"]


def ipv4(destination: str, first: int = 0x45, protocol: int = 6, place: int = 0) -> bytes:
    packet = struct.pack("!BBHHHBBH", first, 0, 20, 0, place, 64, protocol, 0)
    packet += ipaddress.IPv4Address("10.0.3.15").packed
    return bytes(12) + b"\x08\x00" + packet + ipaddress.IPv4Address(destination).packed


@pytest.fixture
def datagrams() -> list[bytes]:
    return []


@pytest.fixture
def frames(datagrams: list[bytes]) -> egress.FrameFilter:
    frames = egress.FrameFilter(datagrams.append)
    frames.deny([ipaddress.IPv4Network("192.0.2.2/32")])
    return frames


@pytest.mark.parametrize(
    ("frame", "passes"),
    [
        (ipv4("203.0.113.7"), True),
        (ipv4("203.0.113.7", place=0x4000), True),
        (bytes(12) + b"\x08\x06" + bytes(28), True),
        *((ipv4(address), False) for address in ("127.0.0.1", "127.255.0.1", "0.0.0.0", "0.1.2.3", "192.0.2.2")),
        *((ipv4(address), False) for address in ("169.254.169.254", "239.1.1.1", "255.255.255.255")),
        (ipv4("203.0.113.7", first=0x65), False),
        (ipv4("203.0.113.7", first=0x46), False),  # options
        *((ipv4("203.0.113.7", place=place), False) for place in (0x2000, 1)),  # fragments
        (ipv4("203.0.113.7", protocol=47), False),
        (ipv4("203.0.113.7")[:33], False),
        (bytes(12) + b"\x86\xdd" + bytes(60), False),
        (bytes(12) + b"\x81\x00\x00\x01" + ipv4("127.0.0.1")[12:], False),
        *((bytes(size), False) for size in (0, 13)),
    ],
)
def test_only_arp_and_ipv4_to_other_hosts_pass(frames: egress.FrameFilter, frame: bytes, passes: bool) -> None:
    for _ in range(2):  # the second verdict may come from memory
        assert frames.feed(framed(frame)) == (framed(frame) if passes else b"")


def test_frames_to_denied_addresses_are_counted(frames: egress.FrameFilter) -> None:
    for destination in ("127.0.0.1", "203.0.113.7", "127.0.0.1", "192.0.2.2"):
        frames.feed(framed(ipv4(destination)))
    assert frames.denied == 3


def test_frames_are_found_however_the_stream_is_cut(frames: egress.FrameFilter) -> None:
    good = framed(ipv4("203.0.113.7"))
    stream = good + framed(ipv4("127.0.0.1")) + framed(b"") + good
    for size in (1, 3, 5, 40, len(stream)):
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert b"".join(frames.feed(piece) for piece in pieces) == good + good


def test_a_new_address_of_the_host_is_denied_at_once(frames: egress.FrameFilter) -> None:
    frame = framed(ipv4("203.0.113.7"))
    assert frames.feed(frame) == frame
    frames.deny([ipaddress.IPv4Network("203.0.113.7/32")])
    assert frames.feed(frame) == b""


@pytest.mark.parametrize("address", ["10.1.2.3", "172.31.0.1", "192.168.1.1", "100.127.255.254", "192.0.2.9"])
def test_a_private_network_is_reached_only_if_it_is_opened(address: str) -> None:
    refused: list[bytes] = []
    frame = ipv4(address)
    for opened, passes in (((), False), ((ipaddress.IPv4Network(f"{address}/32"),), True)):
        frames = egress.FrameFilter(lambda _: None, opened, refused.append)
        frames.deny([ipaddress.IPv4Network("192.0.2.2/32")], near=[ipaddress.IPv4Network("192.0.2.0/24")])
        assert frames.feed(framed(frame)) == (framed(frame) if passes else b"")
    assert refused == [frame]


def test_what_is_never_reached_cannot_be_opened() -> None:
    frames = egress.FrameFilter(lambda _: None, [ipaddress.IPv4Network("0.0.0.0/0")])
    frames.deny([ipaddress.IPv4Network("192.0.2.2/32")])
    for address in ("127.0.0.1", "169.254.169.254", "100.100.100.200", "192.0.2.2"):
        assert frames.feed(framed(ipv4(address))) == b""


@pytest.mark.parametrize("protocol", [17, 1], ids=["udp", "icmp"])
def test_datagrams_never_reach_passt(frames: egress.FrameFilter, datagrams: list[bytes], protocol: int) -> None:
    permitted, denied = ipv4("203.0.113.7", protocol=protocol), ipv4("127.0.0.1", protocol=protocol)
    assert frames.feed(framed(permitted) + framed(denied)) == b""
    assert datagrams == [permitted]


def test_a_frame_that_is_not_all_there_waits() -> None:
    stream = framed(b"abc") + framed(b"") + framed(b"longer")
    for cut, whole in ((0, len(stream)), (1, 11), (len(stream) - 3, 0)):
        arrived = stream[: len(stream) - cut]
        assert egress.sift(arrived, lambda *frame: True) == (stream[:whole], arrived[whole:])


def segment(flags: int, options: bytes = b"", place: int = 0, protocol: int = 6) -> bytes:
    """A frame of passt's with a TCP segment."""
    header = struct.pack("!BBHHHBBH4s4s", 0x45 + len(options) // 4, 0, 0, 0, place, 64, protocol, 0, bytes(4), bytes(4))
    return bytes(12) + b"\x08\x00" + header + options + struct.pack("!HHIIBBHHH", 80, 81, 1, 0, 0x50, flags, 9, 0, 0)


@pytest.mark.parametrize(
    ("frame", "passes"),
    [
        *((segment(flags), False) for flags in (0, 0x08, 0x29, 0xC0)),  # none; PSH; FIN, PSH, URG; ECN's
        (segment(0, options=b"\x01" * 8), False),
        (segment(0, options=b"\xff" * 40), False),
        (segment(0, place=0x4000), False),
        (segment(0x10)[:47], False),
        (segment(0x10, options=b"\x01" * 40)[:60], False),
        *((segment(flags), True) for flags in (0x02, 0x04, 0x10, 0x11)),
        (segment(0x10, options=bytes(40)), True),
        (segment(0x18) + bytes(1460), True),
        (segment(0, place=1), True),  # data of a fragment
        (segment(0, protocol=17), True),
        (bytes(12) + b"\x08\x06" + bytes(42), True),
        (bytes(12) + b"\x86\xdd" + bytes(60), True),
        (segment(0)[:33], True),
        (b"", True),
    ],
)
def test_a_segment_without_flags_is_not_for_the_machine(frame: bytes, passes: bool) -> None:
    stream = framed(segment(0x10)) + framed(frame) + framed(segment(0x10))
    expected = stream if passes else framed(segment(0x10)) * 2
    assert egress.sift(stream, egress.is_for_machine) == (expected, b"")


def test_a_stream_with_an_impossible_length_is_given_up(frames: egress.FrameFilter) -> None:
    with pytest.raises(ValueError, match="bytes"):
        frames.feed(b"\xff\xff\xff\xff")


def test_counts_can_be_read_at_once_and_take_bounded_space(tmp_path: Path) -> None:
    path = tmp_path / "counters"
    counters = Counters(path)
    assert read(path) == Counts()
    size = path.stat().st_size
    for total in range(1000):
        counters.frames_denied(total)
    counters.connected(is_allowed=True)
    counters.connected(is_allowed=True)
    counters.connected(is_allowed=False)
    assert read(path) == Counts(denied=999, onward=2, outside=1)
    assert path.stat().st_size == size


def test_without_a_file_they_stay_in_memory() -> None:
    Counters(None).connected(is_allowed=True)


@pytest.mark.parametrize("content", [b"", b"short", bytes(100)], ids=["empty", "short", "long"])
def test_a_file_that_holds_something_else_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "counters"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="no counters"):
        read(path)
