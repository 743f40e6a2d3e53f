"""Tests how much of endless output is kept."""

from __future__ import annotations

import re

import pytest

from provisioner.ssh.exchange import BoundedBuffer, StreamSize


@pytest.mark.parametrize(
    ("limit_bytes", "written", "kept"),
    [
        (8, [b"12345678"], b"12345678"),
        (8, [b"1234", b"5678", b"9"], b"1234\n[... 1 bytes cut out ...]\n6789"),
        (8, [b"123456789abc"], b"1234\n[... 4 bytes cut out ...]\n9abc"),
        (8, [b"1"] * 1000 + [b"end."], b"1111\n[... 996 bytes cut out ...]\nend."),
        (1, [b"first", b"last"], b"f\n[... 7 bytes cut out ...]\nt"),
        (8, [], b""),
    ],
    ids=["all-of-it", "one-too-many", "in-one-piece", "in-a-thousand-pieces", "hardly-any-room", "nothing"],
)
def test_the_first_and_the_last_half_are_kept(limit_bytes: int, written: list[bytes], kept: bytes) -> None:
    buffer = BoundedBuffer(limit_bytes)
    for data in written:
        buffer.write(data)
    assert buffer.value() == kept
    total = sum(len(data) for data in written)
    assert buffer.size == StreamSize(total, total - len(kept.replace(_mark(kept), b"")))


def _mark(kept: bytes) -> bytes:
    match = re.search(rb"\n\[\.\.\. \d+ bytes cut out \.\.\.\]\n", kept)
    return match[0] if match else b"no mark"


def test_endless_output_takes_a_bounded_amount_of_memory() -> None:
    buffer = BoundedBuffer(1000)
    for _ in range(1000):
        buffer.write(bytes(100))
        assert len(buffer._head) + len(buffer._tail) <= 1500


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ([b"12345678"], b"12345678"),
        ([b"first", b"last5678"], b"\n[... 5 bytes cut out ...]\nlast5678"),
        ([b"1"] * 1000 + [b"end."], b"\n[... 996 bytes cut out ...]\n1111end."),
    ],
    ids=["all-of-it", "in-two-pieces", "in-a-thousand-pieces"],
)
def test_the_end_alone_can_be_kept(written: list[bytes], kept: bytes) -> None:
    buffer = BoundedBuffer(8, beginning_bytes=0)
    for data in written:
        buffer.write(data)
    assert buffer.value() == kept
