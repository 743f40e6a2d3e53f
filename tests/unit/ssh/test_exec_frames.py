"""Tests what the controller accepts of an exec server's answers."""

from __future__ import annotations

import json
import re

import pytest

from provisioner.base.frames import HEADER, frame
from provisioner.clouds.guest_files import GUEST
from provisioner.ssh import exec_frames
from provisioner.ssh.exec_frames import (
    ALIVE,
    DATA_LIMIT_BYTES,
    EXIT,
    REQUEST,
    STARTED,
    STDERR,
    STDOUT,
    Answers,
    CallEnd,
    ExecViolation,
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
