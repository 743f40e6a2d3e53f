"""Splits streams of frames, in whatever pieces they come, and checks each frame before its payload."""

from __future__ import annotations

import pytest

from provisioner.base.frames import HEADER, Frames, frame

SENT = frame(b"o", b"abc") + frame(b"z") + frame(b"e", bytes(70_000))
SPLIT = [(b"o", b"abc"), (b"z", b""), (b"e", bytes(70_000))]


class RefusedError(Exception):
    """The frame is refused."""


def anything(kind: bytes, length: int) -> None:
    """Expects any frame."""


@pytest.mark.parametrize("size", [1, 4, 5, 6, 4096, len(SENT)])
def test_frames_may_come_in_any_pieces(size: int) -> None:
    frames = Frames(anything)
    pieces = [SENT[begin : begin + size] for begin in range(0, len(SENT), size)]
    assert [each for piece in pieces for each in frames.feed(piece)] == SPLIT
    assert frames.is_between


def test_a_frame_is_refused_before_its_payload_has_come() -> None:
    asked: list[tuple[bytes, int]] = []

    def require(kind: bytes, length: int) -> None:
        asked.append((kind, length))
        if length > 10:
            raise RefusedError

    frames = Frames(require)
    split = frames.feed(frame(b"o", b"abc") + HEADER.pack(b"o", 0xFFFF_FFFF))
    assert next(split) == (b"o", b"abc")
    with pytest.raises(RefusedError):
        next(split)
    assert asked == [(b"o", 3), (b"o", 0xFFFF_FFFF)]


def test_what_may_come_next_may_depend_on_the_frame_before() -> None:
    ended = False

    def require(kind: bytes, length: int) -> None:
        if ended:
            raise RefusedError

    frames = Frames(require)
    split = frames.feed(frame(b"x") + frame(b"o", b"late"))
    ended = next(split) == (b"x", b"")
    with pytest.raises(RefusedError):
        next(split)


def test_a_frame_that_was_not_taken_is_yielded_next() -> None:
    frames = Frames(anything)
    for kind, _ in frames.feed(frame(b"o", b"first") + frame(b"e", b"second")):
        assert kind == b"o"
        break
    assert not frames.is_between
    assert list(frames.feed(b"")) == [(b"e", b"second")]


def test_the_beginning_of_a_frame_is_no_end() -> None:
    frames = Frames(anything)
    assert list(frames.feed(frame(b"z") + b"o\0")) == [(b"z", b"")]
    assert not frames.is_between
