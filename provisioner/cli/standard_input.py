"""Reads this process's standard input for a command in a machine, and keeps its terminal in raw mode meanwhile."""

from __future__ import annotations

import contextlib
import os
import select
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from provisioner.base.errors import HostError


class StandardInput:
    """Reads from a descriptor without waiting.

    Args:
        descriptor: stdin, except in tests.
    """

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        # A job in the background would be stopped if it read from the terminal.
        self._is_readable = not _is_foreign_terminal(descriptor)

    def read(self, limit_bytes: int, /) -> bytes | None:
        """Takes a piece: None if there is none yet, empty at the end.

        Raises:
            HostError: it cannot be read.
        """
        if not self._is_readable:
            return b""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if not poll.poll(0):
            return None
        try:
            return os.read(self._descriptor, limit_bytes)
        except BlockingIOError:
            return None
        except OSError as error:
            if os.isatty(self._descriptor):  # it hung up
                return b""
            raise HostError(f"Standard input cannot be read: {error.strerror}.") from error

    def fileno(self) -> int:
        """Returns the descriptor."""
        return self._descriptor


def _is_foreign_terminal(descriptor: int) -> bool:
    """Returns whether another job has the terminal."""
    with contextlib.suppress(OSError):
        return os.isatty(descriptor) and os.tcgetpgrp(descriptor) != os.getpgrp()
    return False


def terminal_size(descriptor: int) -> os.terminal_size:
    """Returns the size of a terminal; no size if it hung up."""
    with contextlib.suppress(OSError):
        return os.get_terminal_size(descriptor)
    return os.terminal_size((0, 0))


@contextlib.contextmanager
def raw_terminal(descriptor: int, shield: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Keeps a terminal in raw mode while the body runs, and restores its mode whatever happens.

    What was typed for the body and not read by it is dropped, and so are the terminal's answers to a machine that asked
    it for something: a shell would take them for commands.

    Args:
        shield: returns a context that no signal interrupts.
    """
    before = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor, termios.TCSANOW)
        yield
    finally:
        with shield(), contextlib.suppress(termios.error):  # it hung up
            # TCSAFLUSH would wait for output that no program may ever read
            termios.tcflush(descriptor, termios.TCIFLUSH)
            termios.tcsetattr(descriptor, termios.TCSANOW, before)
