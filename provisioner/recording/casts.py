"""Records terminals as asciinema does (asciicast v2), in the environment's logs, and reads the recordings.

What a machine shows is hostile: each recording is bounded in bytes, its lines are JSON in ASCII, in which no control
sequence survives as such, and none is believed when it is read. What is typed is not recorded: passwords are.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from provisioner.base import strict_json
from provisioner.base.printable import encodable
from provisioner.base.redaction import Redactor
from provisioner.recording.calls import CALLS, LINE_BYTES, LINE_VALUES, append, lines
from provisioner.recording.manifest import unsealed

SUFFIX = ".cast"
LIMIT_BYTES = 16 << 20
# How many recordings of one kind an environment may have.
MAXIMUM = 200
# Longer output becomes several events.
EVENT_CHARACTERS = 16 << 10
COLUMNS, ROWS = 80, 24
COMMAND_CHARACTERS = 4000
OUTPUT, RESIZE, MARKER = "o", "r", "m"
# An integer of JSON may be too large to be a float.
_MAXIMUM_SECONDS = 1 << 40
# For the event that says where a recording ends early.
_RESERVED_BYTES = 200


class Cast:
    """Records one terminal, or the output of a command that had none. Use as a context manager.

    Args:
        directory: the environment's logs; None records nothing.
        kind: what was recorded, which begins the file's name.
        redactor: removes the secrets, for as many as are known.
        command: what ran.
        columns, rows: the terminal's size.

    `problem` says why there is no recording although there is a directory; empty otherwise.
    """

    def __init__(
        self,
        directory: Path | None,
        kind: str,
        redactor: Redactor,
        command: str = "",
        *,
        columns: int = COLUMNS,
        rows: int = ROWS,
    ) -> None:
        self._begin = time.monotonic()
        self._size = (columns, rows)
        self._left_bytes = LIMIT_BYTES
        self._lost = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._redacted = redactor.stream()
        self._directory = directory
        self.problem = ""
        self._file: int | None = None
        try:
            self._file = _created(directory, kind) if directory else None
        except OSError as error:
            self.problem = error.strerror or str(error)
        self._header: dict[str, object] | None = {
            "version": 2,
            "width": columns,
            "height": rows,
            "timestamp": int(time.time()),
            "title": kind,
            "command": encodable(redactor.redact(command)[:COMMAND_CHARACTERS]),
        }
        self._begin_file()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def show(self, data: bytes) -> None:
        """Records what a terminal shows. Characters and secrets may straddle the pieces."""
        if self._file is not None:
            self._shown(self._redacted.feed(self._decoder.decode(data)))

    def output(self, text: str) -> None:
        """Records output of a command without a terminal, which is free of secrets already: a player wants CR LF."""
        if self._file is not None:
            self._shown(encodable(text.replace("\r\n", "\n").replace("\n", "\r\n")))

    def resize(self, columns: int, rows: int) -> None:
        """Records that the terminal has another size, if it has."""
        if (columns, rows) != self._size:
            self._size = (columns, rows)
            self._event(RESIZE, f"{columns}x{rows}")

    def close(self) -> None:
        """Records what was held back, and ends."""
        if self._file is not None:
            last = self._redacted.feed(self._decoder.decode(b"", final=True))
            self._shown(last + self._redacted.flush())
            self._tell_lost()
        self._end()

    def _begin_file(self) -> bool:
        """Writes the header if it was not written yet, as on a full disk, and returns whether it is there."""
        if self._header and self._write(self._header):
            self._header = None
        return self._header is None

    def _tell_lost(self) -> None:
        said = f"{self._lost} pieces were lost: no room on the disk"
        if self._lost and self._begin_file() and self._write([self._seconds(), MARKER, said]):
            self._lost = 0

    def _end(self) -> None:
        descriptor, self._file = self._file, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _shown(self, text: str) -> None:
        for begin in range(0, len(text), EVENT_CHARACTERS):
            self._event(OUTPUT, text[begin : begin + EVENT_CHARACTERS])

    def _event(self, kind: str, text: str) -> None:
        self._tell_lost()
        if not self._begin_file() or not self._write([self._seconds(), kind, text]):
            self._lost += 1

    def _seconds(self) -> float:
        return round(time.monotonic() - self._begin, 3)

    def _write(self, line: object) -> bool:
        """Writes a line and returns whether that worked. At the limit, writes that it was reached, and ends."""
        if self._file is None or self._directory is None:
            return True
        data = json.dumps(line).encode() + b"\n"
        is_last = len(data) > self._left_bytes - _RESERVED_BYTES
        if is_last:
            data = json.dumps([self._seconds(), MARKER, "cut here: the recording has reached its limit"]).encode()
            data += b"\n"
        try:
            with unsealed(self._directory) as is_open:
                if not is_open:
                    self._end()
                    return True
                if not append(self._file, data):
                    return False
        except FileNotFoundError:  # the environment is gone
            self._end()
            return True
        except OSError:
            return False
        self._left_bytes -= len(data)
        if is_last:
            self._end()
        return True


def _created(directory: Path, kind: str) -> int:
    """Creates the next recording of a kind.

    Raises:
        OSError: that does not work, or there are as many of this kind as there may be.
    """
    for number in range(1, MAXIMUM + 1):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(directory / f"{kind}-{number}{SUFFIX}", flags, 0o600)
        except FileExistsError:
            continue
    raise OSError(f"there are {MAXIMUM} recordings of this kind already")


class DamagedCastError(ValueError):
    """A recording does not hold what a recording does. The message says where, in a few words."""


@dataclass(frozen=True)
class Header:
    """What a recording says of itself."""

    title: str
    command: str
    timestamp: int


@dataclass(frozen=True)
class Event:
    """What happened in a recording.

    Args:
        seconds: since its beginning.
        kind: OUTPUT, RESIZE or MARKER; others are possible in recordings that are not ours.
        text: as the machine sent it: never to be shown as it is.
    """

    seconds: float
    kind: str
    text: str


def parts_of(logs: Path) -> list[Path]:
    """Returns what `provisioner replay` can show of an environment's logs: the terminals by their times, then calls."""
    terminals = sorted(logs.glob(f"*{SUFFIX}"), key=lambda path: (_begin(path), path.stem))
    return [*terminals, *logs.glob(CALLS)]


def _begin(path: Path) -> int:
    try:
        return header_of(path).timestamp
    except (OSError, DamagedCastError):
        return 0


def header_of(path: Path) -> Header:
    """Reads the first line of a recording.

    Raises:
        OSError: it cannot be read.
        DamagedCastError: it is none.
    """
    value = next(_lines(path), None)
    if not isinstance(value, dict) or value.get("version") != 2:
        raise DamagedCastError("it does not begin as an asciicast does")
    timestamp = value.get("timestamp")
    return Header(
        title=str(value.get("title", "")),
        command=str(value.get("command", "")),
        timestamp=timestamp if isinstance(timestamp, int) and 0 <= timestamp < 1 << 40 else 0,
    )


def events_of(path: Path) -> Iterator[Event]:
    """Yields the events of a recording, in their order, which never goes back in time.

    Raises:
        OSError: it cannot be read.
        DamagedCastError: a line is no event.
    """
    last = 0.0
    for number, value in enumerate(_lines(path), start=1):
        if number == 1:
            continue
        match value:
            case [int() | float() as seconds, str() as kind, str() as text] if abs(seconds) <= _MAXIMUM_SECONDS:
                last = max(last, float(seconds))
                yield Event(last, kind, text)
            case _:
                raise DamagedCastError(f"line {number} is no event")


def _lines(path: Path) -> Iterator[Any]:
    left_bytes = LIMIT_BYTES
    for number, line in enumerate(lines(path), start=1):
        if left_bytes <= 0:
            return
        left_bytes -= len(line)
        try:
            yield strict_json.parse(line, limit_bytes=LINE_BYTES, maximum_values=LINE_VALUES)
        except strict_json.NotStrictJsonError as error:
            raise DamagedCastError(f"line {number} cannot be read: {error}") from error
