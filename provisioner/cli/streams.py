"""Makes stdout and stderr safe to print to: open, able to take any character, and silent once nobody reads them."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TextIO, cast


def prepare() -> None:
    """Opens what the caller closed, and has characters that the terminal's encoding lacks escaped.

    A descriptor left closed would be given to the next file that is opened, and output would go into it.
    """
    _plug()
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure:
        reconfigure(errors="backslashreplace")


def silence(stream: TextIO) -> None:
    """Sends what else is written to the stream nowhere: its reader is gone, or its disk is full.

    What is still buffered goes the same way; else Python would complain about it when it ends.
    """
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


class SteadyStderr(io.TextIOBase):
    """What sys.stderr is at the moment. That nobody can read it stops nothing, least of all a clean-up."""

    @property
    def _stream(self) -> TextIO | None:
        # While a spinner turns, sys.stderr is Rich's proxy, which would come back here. None: closed from the start.
        return cast(TextIO | None, getattr(sys.stderr, "rich_proxied_file", sys.stderr))

    def write(self, text: str) -> int:
        """Writes the text, or drops it."""
        if stream := self._stream:
            try:
                stream.write(text)
                stream.flush()
            except RuntimeError:
                # A signal came while a line was being written, and its handler writes another: Python's buffer cannot
                # be entered twice, and the handler must not raise in the middle of a clean-up.
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
        """Its encoding, which decides what progress is drawn with."""
        return self._stream.encoding if self._stream else "utf-8"


def stderr() -> TextIO:
    """stderr for progress, errors and tracebacks."""
    return cast(TextIO, SteadyStderr())


def _plug() -> None:
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _nowhere() -> TextIO:
    return open(os.devnull, "w")  # noqa: PTH123 - stays open as long as the process lives
