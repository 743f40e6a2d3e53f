"""Makes stdout and stderr safe to print to: open, able to print any character, and silent once they are closed."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TextIO, cast


def prepare() -> None:
    """Opens stdin, stdout and stderr if the caller closed them, and escapes characters that their encodings lack.

    Otherwise the next file to be opened would get a closed one's descriptor, and output would go into that file.
    """
    _plug()
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure:
        reconfigure(errors="backslashreplace")


def silence(stream: TextIO) -> None:
    """Discards everything that is written to the stream from now on, for a closed pipe or a full disk.

    Also discards buffered output, about which Python would otherwise complain when it exits.
    """
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


class SteadyStderr(io.TextIOBase):
    """Writes to the current sys.stderr. Ignores errors, which must not stop a clean-up."""

    @property
    def _stream(self) -> TextIO | None:
        # While a spinner runs, sys.stderr is Rich's proxy, which would call this again. None: closed from the start.
        return cast(TextIO | None, getattr(sys.stderr, "rich_proxied_file", sys.stderr))

    def write(self, text: str) -> int:
        """Writes the text, or drops it after an error."""
        if stream := self._stream:
            try:
                stream.write(text)
                stream.flush()
            except RuntimeError:
                # A signal handler writes while a line is being written. Python's buffer is not reentrant, and the
                # handler must not raise in the middle of a clean-up.
                with contextlib.suppress(OSError):
                    os.write(stream.fileno(), text.encode(errors="backslashreplace"))
            except OSError:  # a pipe without a reader, a terminal that hung up, a full disk
                with contextlib.suppress(OSError):
                    silence(stream)
        return len(text)

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return bool(self._stream and self._stream.isatty())

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Its encoding, which determines the characters that progress is drawn with."""
        return self._stream.encoding if self._stream else "utf-8"


def stderr() -> TextIO:
    """Returns the stream for progress, errors and tracebacks."""
    return cast(TextIO, SteadyStderr())


def _plug() -> None:
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _nowhere() -> TextIO:
    return open(os.devnull, "w")  # noqa: PTH123 - stays open as long as the process lives
