"""The file in which a machine keeps the end of an agent's output. environment/test_agent.py runs the rest."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.clouds.guest_files import GUEST

sys.path.insert(0, str(GUEST))
from agent import CHUNK_BYTES, Ring

CAPACITY_BYTES = 4 * CHUNK_BYTES


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    descriptor = os.open(tmp_path / "ring", os.O_RDWR | os.O_CREAT)
    yield Ring(descriptor, CAPACITY_BYTES)
    os.close(descriptor)


def read_all(ring: Ring, offset: int) -> tuple[int, bytes]:
    first, data = ring.read(offset)
    offset, collected = first + len(data), data
    while data:
        offset, data = ring.read(offset)
        collected += data
        offset += len(data)
    return first, collected


def test_a_follower_reads_what_was_written_since(ring: Ring) -> None:
    assert ring.read(0) == (0, b"")
    ring.write(b"abc")
    ring.write(b"def")
    assert ring.read(0) == (0, b"abcdef")
    assert ring.read(4) == (4, b"ef")
    assert ring.read(6) == (6, b"")


def test_the_file_is_bounded_and_keeps_the_end(ring: Ring, tmp_path: Path) -> None:
    chance = random.Random(7)
    written = b""
    for _ in range(60):
        piece = chance.randbytes(chance.randint(1, CHUNK_BYTES))
        ring.write(piece)
        written += piece
    offset, kept = read_all(ring, 0)
    assert written[offset:] == kept
    assert len(kept) >= CAPACITY_BYTES - CHUNK_BYTES
    assert (tmp_path / "ring").stat().st_size <= CAPACITY_BYTES + 8
