"""Turns a command's output into text without secrets and passes it on twice: to a listener and to a log.

Output is not trusted: bytes that are not UTF-8 are replaced, and the size of the log is bounded.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Self

from provisioner.base.redaction import Redactor
from provisioner.recording.casts import Cast
from provisioner.recording.manifest import unsealed

# How long a log gets, whatever is written to it in its life. Twice what an honest command prints.
LOG_LIMIT_BYTES = 16 << 20
_CUT = b"\n[... cut out: the log was too long ...]\n"


class OutputTee:
    """Passes on the output of one command as it arrives. Use as a context manager: its end passes on text held back.

    Args:
        redactor: removes the secrets.
        listener: called with each piece of text.
        log: file that the text is appended to, until its directory is sealed; None writes no log.
        limit_bytes: how long the file may get, with what earlier commands wrote. At least its first and last quarter
            are kept.
        heading: a line written to the log before the output, with an empty line after the output; "" for neither.
        cast: records the output with its times.
    """

    def __init__(
        self,
        redactor: Redactor,
        listener: Callable[[str], None],
        log: Path | None = None,
        limit_bytes: int = LOG_LIMIT_BYTES,
        heading: str = "",
        cast: Cast | None = None,
    ) -> None:
        self._redactor = redactor
        self._listener = listener
        self._log = _RingLog(log, limit_bytes) if log else None
        self._heading = heading
        self._cast = cast
        self._streams: list[_RedactedStream] = []

    def __enter__(self) -> Self:
        if self._heading:
            self._keep(self._redactor.redact(self._heading) + "\n")
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for stream in self._streams:
                stream.flush()
            if self._heading:
                self._keep("\n")
        finally:
            if self._log:
                self._log.close()

    def stream(self) -> Callable[[bytes], None]:
        """Returns a function that takes the pieces of one stream. stdout and stderr need one each."""
        stream = _RedactedStream(self._redactor, self._pass_on)
        self._streams.append(stream)
        return stream.feed

    def _pass_on(self, text: str) -> None:
        self._keep(text)
        if self._cast:
            self._cast.output(text)
        self._listener(text)

    def _keep(self, text: str) -> None:
        if self._log:
            self._log.write(text)


class _RedactedStream:
    """Turns one stream of bytes into text without secrets. Characters and secrets may straddle its pieces."""

    def __init__(self, redactor: Redactor, pass_on: Callable[[str], None]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._redactor = redactor.stream()
        self._pass_on = pass_on

    def feed(self, data: bytes) -> None:
        """Passes on the text that can be decoded and shown so far."""
        self._emit(self._redactor.feed(self._decoder.decode(data)))

    def flush(self) -> None:
        """Passes on the text that was held back, at the end of the stream."""
        last = self._redactor.feed(self._decoder.decode(b"", final=True))
        self._emit(last + self._redactor.flush())

    def _emit(self, text: str) -> None:
        if text:
            self._pass_on(text)


class _RingLog:
    """Appends UTF-8 text to a file, and cuts the middle out of one that gets too long.

    Other processes may write to the same file in the same way: each waits for the other.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._directory = path.parent
        self._limit_bytes = limit_bytes
        self._file: IO[bytes] | None = None
        with unsealed(self._directory) as is_open:
            if is_open:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                self._file = os.fdopen(descriptor, "r+b")

    def write(self, text: str) -> None:
        """Appends text, so that others see it at once. Writes nothing once the environment is gone."""
        with contextlib.suppress(FileNotFoundError), unsealed(self._directory) as is_open:
            if is_open and self._file:
                self._append(self._file, text)

    def _append(self, file: IO[bytes], text: str) -> None:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            file.seek(0, os.SEEK_END)
            file.write(text.encode())
            if file.tell() > self._limit_bytes:
                _cut_middle(file, self._limit_bytes // 4)
            file.flush()
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Closes the file."""
        if self._file:
            self._file.close()


def _cut_middle(file: IO[bytes], kept_bytes: int) -> None:
    file.seek(-kept_bytes, os.SEEK_END)
    end = file.read()
    file.seek(kept_bytes)
    file.write(_CUT + end)
    file.truncate()
