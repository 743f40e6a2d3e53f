"""Tests what the controller accepts of an exec server's answers."""

from __future__ import annotations

import json
import re

import pytest

from provisioner.clouds.guest_files import GUEST
from provisioner.ssh import exec_frames
from provisioner.ssh.exec_frames import (
    ALIVE,
    DATA_LIMIT_BYTES,
    EXIT,
    HEADER,
    REQUEST,
    STARTED,
    STDERR,
    STDOUT,
    Answers,
    CallEnd,
    ExecViolation,
    Frames,
    frame,
    request,
)


def end(**said: object) -> bytes:
    return frame(EXIT, json.dumps(said).encode())


@pytest.mark.parametrize("piece", [1, 3, 1000], ids=str)
def test_answers_are_read_however_they_are_cut(piece: int) -> None:
    stream = frame(STARTED) + frame(STDOUT, b"out") + frame(ALIVE) + frame(STDERR, b"err") + end(code=7)
    answers, output = Answers(), []
    for begin in range(0, len(stream), piece):
        output += list(answers.feed(stream[begin : begin + piece], 0))
    assert output == [("stdout", b"out"), ("stderr", b"err")]
    assert answers.end == CallEnd(code=7)


@pytest.mark.parametrize(
    "stream",
    [
        frame(b"?"),
        frame(REQUEST, b"{}"),
        frame(STARTED, b"x"),
        frame(STARTED) + frame(STARTED),
        frame(STDOUT, b"early"),
        frame(STARTED) + frame(STDOUT),
        frame(STARTED) + HEADER.pack(STDOUT, DATA_LIMIT_BYTES + 1),
        frame(STARTED) + HEADER.pack(EXIT, 1 << 31),
        HEADER.pack(STDOUT, 0xFFFF_FFFF),
        frame(ALIVE) * 100,
        end(code=0),
        *(
            frame(STARTED) + end(**said)
            for said in (
                {}, {"code": -1}, {"code": 256}, {"code": True}, {"code": 1.0}, {"code": "0"}, {"code": 0, "more": 1},
                {"timed_out": False}, {"errno": 0, "what": "user", "text": ""},
                {"errno": 2, "what": "x" * 99, "text": ""},
                {"errno": 2, "what": "user", "text": 3},
            )
        ),
        frame(STARTED) + frame(EXIT, b"[" * 5000),
        frame(STARTED) + frame(EXIT, b'{"code": 0, "code": 0}'),
        frame(STARTED) + end(code=0) + frame(STDOUT, b"late"),
    ],
)  # fmt: skip
def test_anything_else_is_a_violation(stream: bytes) -> None:
    with pytest.raises(ExecViolation):
        list(Answers().feed(stream, 0))


def test_signs_of_life_may_last_as_long_as_the_call() -> None:
    answers = Answers()
    for second in range(0, 10_000, 10):
        assert list(answers.feed(frame(ALIVE), second)) == []


def test_a_request_of_any_bytes_is_ascii_and_bounded() -> None:
    sent = request("execute", user="agent", argv=["ä", "\udcff"], environment={"A": "b"}, timeout_seconds=1.5)
    assert sent[HEADER.size :].isascii()
    assert json.loads(sent[HEADER.size :])["argv"] == ["ä", "\udcff"]
    with pytest.raises(ValueError, match="MiB of arguments"):
        request("execute", user="agent", argv=["x" * (17 << 20)])


def test_both_sides_know_the_same_frames() -> None:
    theirs = (GUEST / "provisioner_guest/exec/call.py").read_text()
    for names, values in re.findall(r"^([A-Z, _]+) = ((?:b\"\w\"(?:, )?)+)", theirs, re.MULTILINE):
        for name, value in zip(names.split(", "), values.split(", "), strict=True):
            assert getattr(exec_frames, name) == value[2:-1].encode()


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
