"""Parses what guest/agent.py sends: pieces of the agent's output with their offsets, and how the agent ended.

The bytes are not trusted: lines and frames are bounded, and each end is checked. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from provisioner.base import strict_json

LINE_LIMIT_BYTES = 64
# What guest/agent.py sends at once, and more than its last frame has.
FRAME_LIMIT_BYTES = 64 << 10
# guest/agent.py gives a sign of life every ten seconds. A controller that was suspended gets those of the meantime at
# once: fewer than a hundred, as TCP gives up after about a quarter of an hour (tcp(7), tcp_retries2).
ALIVE_AT_ONCE = 100
ALIVE_PER_SECOND = 1.0
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
        unknown: whether the machine said on this connection that it has no such agent.
        end: how the agent ended; None until then.
    """

    def __init__(self, on_output: Callable[[str, bytes], None]) -> None:
        self._on_output = on_output
        self._pending = bytearray()
        self._frame: tuple[str, int, int] | None = None
        self._alive = 0
        self._seconds = 0.0
        self.offsets = {"o": 0, "e": 0}
        self.lost_bytes = {"o": 0, "e": 0}
        self.started = False
        self.unknown = False
        self.end: AgentEnd | None = None

    def reconnect(self) -> None:
        """Forgets a frame that a broken connection cut, and that the machine knew no such agent."""
        self._pending.clear()
        self._frame = None
        self.unknown = False

    def feed(self, data: bytes, seconds: float) -> None:
        """Parses a piece of what the machine sent.

        Args:
            seconds: how long the agent has been followed, over all connections.

        Raises:
            FrameError: it is no frame, or none that guest/agent.py would send now.
        """
        self._seconds = seconds
        self._pending += data
        while self._parse_line() if self._frame is None else self._parse_body(*self._frame):
            pass

    def _parse_line(self) -> bool:
        end = self._pending.find(b"\n", 0, LINE_LIMIT_BYTES + 1)
        if end < 0:
            if len(self._pending) > LINE_LIMIT_BYTES:
                raise FrameError("a line is too long")
            return False
        try:
            kind, offset, length = self._pending[:end].decode("ascii").split(" ")
            self._frame = kind, int(offset), int(length)
        except ValueError:
            raise FrameError("a line is not a frame's") from None
        del self._pending[: end + 1]
        self._require_expected(*self._frame)
        return True

    def _require_expected(self, kind: str, offset: int, length: int) -> None:
        if self.end or self.unknown:
            raise FrameError("something follows the end")
        if offset > MAXIMUM_OFFSET:
            raise FrameError("a frame lies where no output can be")
        if not (1 <= length <= FRAME_LIMIT_BYTES if kind in ("o", "e", "x") else kind in ("b", "n") and length == 0):
            raise FrameError("a frame is of no known kind or size")
        if kind == "b" and self._alive > ALIVE_AT_ONCE + self._seconds * ALIVE_PER_SECOND:
            raise FrameError("signs of life never cease")

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
        elif kind == "b":
            self._alive += 1
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
