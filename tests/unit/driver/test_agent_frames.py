"""Parses what the program that runs agents sends, whole, in pieces, and across connections."""

from __future__ import annotations

import pytest

from provisioner.driver.agent_frames import AgentEnd, AgentFrames, FrameError


def frames() -> tuple[AgentFrames, list[tuple[str, bytes]]]:
    said: list[tuple[str, bytes]] = []
    return AgentFrames(lambda kind, data: said.append((kind, data))), said


def test_frames_may_arrive_in_any_pieces() -> None:
    sent = b'o 0 3\nabce 0 2\n12b 0 0\no 3 1\ndx 0 37\n{"exit_code": 3, "timed_out": false}   '
    for size in (1, 2, 7, 1000):
        parsed, said = frames()
        for begin in range(0, len(sent), size):
            parsed.feed(sent[begin : begin + size])
        assert said == [("o", b"abc"), ("e", b"12"), ("o", b"d")]
        assert (parsed.offsets, parsed.started, parsed.unknown) == ({"o": 4, "e": 2}, True, False)
        assert parsed.end == AgentEnd(exit_code=3)


def test_a_frame_that_a_broken_connection_cut_is_sent_again() -> None:
    parsed, said = frames()
    parsed.feed(b"o 0 3\nab")
    parsed.reconnect()
    parsed.feed(b"o 0 3\nabc")
    assert said == [("o", b"abc")]


def test_output_that_the_machine_no_longer_has_leaves_a_mark() -> None:
    parsed, said = frames()
    parsed.feed(b"o 500 1\nx")
    assert said == [("o", b"\n[... 500 bytes cut out ...]\n"), ("o", b"x")]
    assert parsed.offsets["o"] == 501


def test_a_machine_that_knows_no_such_agent_says_so() -> None:
    parsed, _ = frames()
    parsed.feed(b"n 0 0\n")
    assert (parsed.unknown, parsed.started, parsed.end) == (True, False, None)


@pytest.mark.parametrize(
    "sent",
    [b"y 0 0\n", b"o 0\n", b"o 0 -1\n", b"o 0 70000\n", b"o x 1\n", b"o 0 1\nab 0 0\no 0 1\nb", b"a" * 65,
     b"\xff 0 0\n", b"x 0 2\n{}", b"x 0 2\n[]", b"x 0 1\n{"],
    ids=["kind", "short", "negative", "large", "word", "twice", "line", "bytes", "keys", "list", "json"],
)  # fmt: skip
def test_anything_else_is_refused(sent: bytes) -> None:
    parsed, _ = frames()
    with pytest.raises(FrameError):
        parsed.feed(sent)


@pytest.mark.parametrize(
    ("said", "end"),
    [
        ('{"exit_code": null, "timed_out": true}', AgentEnd(timed_out=True)),
        ('{"exit_code": -1, "timed_out": false}', AgentEnd(exit_code=-1)),
        ('{"exit_code": null, "timed_out": false}', AgentEnd()),
        ('{"exit_code": true, "timed_out": false}', AgentEnd()),
        ('{"exit_code": 1000, "timed_out": "yes"}', AgentEnd()),
    ],
    ids=["time", "signal", "unknown", "bool", "large"],
)
def test_an_end_is_believed_only_as_far_as_it_makes_sense(said: str, end: AgentEnd) -> None:
    parsed, _ = frames()
    parsed.feed(f"x 0 {len(said)}\n{said}".encode())
    assert parsed.end == end
