"""Tests what becomes of a machine's frames, without any machine: the fabric between two sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from tests.aws.ec2.fabric import NARROW_BYTES, NARROW_PATH, Fabric
from tests.aws.ec2.network import UDP, Interface, Network
from tests.aws.ec2.test_network import PRIMARY, PUBLIC
from tests.aws.ec2.test_packets import frame_of

SILENCE_SECONDS = 0.5
HEADERS_BYTES = 14 + 20 + 8


class Wire:
    """The ends of a machine's card and of its passt, as QEMU and passt hold them.

    Args:
        directory: of the run.
        interface: the machine's.
    """

    def __init__(self, directory: Path, interface: Interface) -> None:
        self.fabric = Fabric(IPv4Address("203.0.113.10"), directory, silent_when_off=True)
        self.fabric.update(Network((interface,)))
        self.guest, qemu = socket.socketpair()
        self.outside, passt = socket.socketpair()
        self.fabric.attach(interface, "02:00:00:00:00:01", qemu, passt, {})
        self.outside.settimeout(SILENCE_SECONDS)

    def arrives(self, frame: bytes) -> bool:
        """Sends a frame from the machine, and returns whether it comes out at the other end as it was."""
        self.guest.sendall(len(frame).to_bytes(4, "big") + frame)
        try:
            length = int.from_bytes(self.outside.recv(4, socket.MSG_WAITALL), "big")
            return self.outside.recv(length, socket.MSG_WAITALL) == frame
        except TimeoutError:
            return False


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    """Connects a machine whose rules let everything out."""
    laid = Wire(tmp_path, PRIMARY)
    with closing(laid.guest), closing(laid.outside):
        yield laid
        laid.fabric.detach(PRIMARY.instance_id)


def test_a_narrow_path_loses_only_large_packets(wire: Wire, tmp_path: Path) -> None:
    largest = frame_of(UDP, bytes(NARROW_BYTES - HEADERS_BYTES))
    jumbo = frame_of(UDP, bytes(NARROW_BYTES - HEADERS_BYTES + 1))
    assert (len(largest), len(jumbo)) == (NARROW_BYTES, NARROW_BYTES + 1)
    assert IPv4Address(jumbo[30:34]) == PUBLIC
    assert wire.arrives(jumbo)
    (tmp_path / NARROW_PATH).touch()
    assert not wire.arrives(jumbo)
    assert wire.arrives(largest)
