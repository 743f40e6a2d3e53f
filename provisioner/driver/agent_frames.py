"""Parses what guest/agent.py sends: pieces of the agent's output with their offsets, and how the agent ended.

The bytes are not trusted: lines and frames are bounded, and each end is checked. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from provisioner import strict_json

LINE_LIMIT_BYTES = 64
# What guest/agent.py sends at once, and more than its last frame has.
FRAME_LIMIT_BYTES = 64 << 10
# More than any agent writes; and programs that read our JSON know no larger whole numbers.
MAXIMUM_OFFSET = 2**53


class FrameError(Exception):
    """The machine sent something that guest/agent.py never does."""


@dataclass(frozen=True)
class AgentEnd:
    """How an agent ended, by the machine's account.

    Args:
        exit_code: -1 if a signal ended it; None if it did not end by itself, or if its end is not known.
        timed_out: whether its time ran out.
    """

    exit_code: int | None = None
    timed_out: bool = False


class AgentFrames:
    """Takes the bytes of one agent in pieces, and across connections.

    Args:
        on_output: called with `o` or `e` and each piece of stdout or stderr. Output that the machine no longer had is
            replaced by a note of its size.

    Attributes:
        offsets: how far each stream was received.
        lost_bytes: how much of each stream the machine no longer had.
        started: whether the machine has said anything about the agent.
        unknown: whether the machine said that it has no such agent.
        end: how the agent ended; None until then.
    """

    def __init__(self, on_output: Callable[[str, bytes], None]) -> None:
        self._on_output = on_output
        self._pending = bytearray()
        self._frame: tuple[str, int, int] | None = None
        self.offsets = {"o": 0, "e": 0}
        self.lost_bytes = {"o": 0, "e": 0}
        self.started = False
        self.unknown = False
        self.end: AgentEnd | None = None

    def reconnect(self) -> None:
        """Forgets a frame that a broken connection cut."""
        self._pending.clear()
        self._frame = None

    def feed(self, data: bytes) -> None:
        """Parses a piece of what the machine sent.

        Raises:
            FrameError: it is no frame.
        """
        self._pending += data
        while self._parse_line() if self._frame is None else self._parse_body(*self._frame):
            pass

    def _parse_line(self) -> bool:
        line, newline, _ = self._pending.partition(b"\n")
        if len(line) > LINE_LIMIT_BYTES:
            raise FrameError("a line is too long")
        if not newline:
            return False
        del self._pending[: len(line) + 1]
        try:
            kind, offset, length = line.decode("ascii").split(" ")
            self._frame = kind, int(offset), int(length)
        except ValueError:
            raise FrameError("a line is not a frame's") from None
        if self._frame[1] > MAXIMUM_OFFSET:
            raise FrameError("a frame lies where no output can be")
        if kind not in ("o", "e", "b", "x", "n") or not 0 <= self._frame[2] <= FRAME_LIMIT_BYTES:
            raise FrameError("a frame is of no known kind or size")
        return True

    def _parse_body(self, kind: str, offset: int, length: int) -> bool:
        if len(self._pending) < length:
            return False
        body = bytes(self._pending[:length])
        del self._pending[:length]
        self._frame = None
        self.unknown = kind == "n"
        self.started = self.started or kind != "n"
        if kind in self.offsets:
            self._output(kind, offset, body)
        elif kind == "x":
            self.end = _parse_end(body)
        return True

    def _output(self, kind: str, offset: int, body: bytes) -> None:
        lost_bytes = offset - self.offsets[kind]
        if lost_bytes < 0:
            raise FrameError("output came twice")
        if lost_bytes:
            self.lost_bytes[kind] += lost_bytes
            self._on_output(kind, b"\n[... %d bytes cut out ...]\n" % lost_bytes)
        self._on_output(kind, body)
        self.offsets[kind] = offset + len(body)


def _parse_end(body: bytes) -> AgentEnd:
    try:
        value = strict_json.parse(body)
        code, timed_out = value["exit_code"], value["timed_out"]
    except (ValueError, LookupError, TypeError):
        raise FrameError("its end cannot be read") from None
    if timed_out is True:
        return AgentEnd(timed_out=True)
    if isinstance(code, int) and not isinstance(code, bool) and -1 <= code <= 255:
        return AgentEnd(exit_code=code)
    return AgentEnd()
