"""Parses what the program that runs agents sends, whole, in pieces, and across connections."""

from __future__ import annotations

import tracemalloc

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
            parsed.feed(sent[begin : begin + size], 0)
        assert said == [("o", b"abc"), ("e", b"12"), ("o", b"d")]
        assert (parsed.offsets, parsed.started, parsed.unknown) == ({"o": 4, "e": 2}, True, False)
        assert parsed.end == AgentEnd(exit_code=3)


def test_a_frame_that_a_broken_connection_cut_is_sent_again() -> None:
    parsed, said = frames()
    parsed.feed(b"o 0 3\nab", 0)
    parsed.reconnect()
    parsed.feed(b"o 0 3\nabc", 0)
    assert said == [("o", b"abc")]


def test_output_that_the_machine_no_longer_has_leaves_a_mark() -> None:
    parsed, said = frames()
    parsed.feed(b"o 500 1\nx", 0)
    assert said == [("o", b"\n[... 500 bytes cut out ...]\n"), ("o", b"x")]
    assert parsed.offsets["o"] == 501


def test_a_machine_that_knows_no_such_agent_says_so() -> None:
    parsed, _ = frames()
    parsed.feed(b"n 0 0\n", 0)
    assert (parsed.unknown, parsed.started, parsed.end) == (True, False, None)


@pytest.mark.parametrize(
    "sent",
    [b"y 0 0\n", b"o 0\n", b"o 0 -1\n", b"o 0 70000\n", b"o x 1\n", b"o 0 1\nab 0 0\no 0 1\nb", b"a" * 65,
     b"\xff 0 0\n", b"x 0 2\n{}", b"x 0 2\n[]", b"x 0 1\n{", b"o 0 0\n", b"e 0 0\n", b"b 0 1\nx", b"n 0 0\nb 0 0\n",
     b'x 0 36\n{"exit_code": 3, "timed_out": false}o 0 1\nx'],
    ids=["kind", "short", "negative", "large", "word", "twice", "line", "bytes", "keys", "list", "json", "empty",
         "empty stderr", "alive", "after n", "after x"],
)  # fmt: skip
def test_anything_else_is_refused(sent: bytes) -> None:
    parsed, _ = frames()
    with pytest.raises(FrameError):
        parsed.feed(sent, 0)


def test_signs_of_life_are_bounded_by_the_time() -> None:
    parsed, _ = frames()
    for second in range(100):
        parsed.feed(b"b 0 0\n", second)
    with pytest.raises(FrameError, match="never cease"):
        parsed.feed(b"b 0 0\n" * 200, 99)


def test_what_follows_a_frame_is_not_copied_with_it() -> None:
    parsed = AgentFrames(lambda _, piece: None)
    sent = b"".join(b"e %d 1000\n%s" % (number * 1000, bytes(1000)) for number in range(1000))
    tracemalloc.start()
    try:
        parsed.feed(sent, 0)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert parsed.offsets["e"] == 1_000_000
    assert peak_bytes < 1.8 * len(sent)


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
    parsed.feed(f"x 0 {len(said)}\n{said}".encode(), 0)
    assert parsed.end == end
