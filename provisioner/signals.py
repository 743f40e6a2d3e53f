"""Handles Ctrl-C and SIGTERM: the first raises KeyboardInterrupt, and later ones do not interrupt the clean-up."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# After this many signals during a clean-up the process ends at once, whatever has not been removed yet.
INSISTENCE = 3
# Methods in which Python does not let a KeyboardInterrupt pass: 3.11 wraps it in a RuntimeError if it comes from
# `__set_name__`, while a class is made, and every version prints and drops what `__del__` raises.
OPAQUE_METHODS = ("__set_name__", "__del__")
POSTPONED_SECONDS = 0.01


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """Returns the exit code after an interruption: 128 and the signal's number, as shells report it."""
    name = interrupt.args[0] if interrupt.args else signal.SIGINT.name
    return 128 + signal.Signals[name]


class Interrupts:
    """Handles the process's signals. Must be created in the main thread.

    Args:
        tell: shows a line to the operator.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._shields = 0
        self._ignored = 0

    def install(self) -> None:
        """Installs the signal handlers."""
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if _is_opaque(frame):
            _thread.start_new_thread(_send_again, (number,))  # threading's own locks may be held here
            return
        if self._shields and self._ignored + 1 < INSISTENCE:
            self._ignored += 1
            left = INSISTENCE - self._ignored
            with contextlib.suppress(Exception):  # it would be raised in the middle of the clean-up
                self._tell(
                    f"Cleaning up; {left} more to quit at once (`provisioner destroy --all` then removes the rest)."
                )
            return
        raise KeyboardInterrupt(signal.Signals(number).name)

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """Ignores signals while the body runs, unless the operator repeats them several times."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1


def _send_again(number: int) -> None:
    time.sleep(POSTPONED_SECONDS)
    os.kill(os.getpid(), number)


def _is_opaque(frame: FrameType | None) -> bool:
    """Tells whether a KeyboardInterrupt raised in this frame would not arrive as one."""
    while frame:
        if frame.f_code.co_name in OPAQUE_METHODS:
            return True
        frame = frame.f_back
    return False


def no_check() -> None:
    """Does nothing: a check for processes that only signals can stop."""


def wait(seconds: float, check: Callable[[], None]) -> None:
    """Waits, but stops at once when the check raises an exception."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        check()
        time.sleep(0.1)


@contextlib.contextmanager
def no_shield() -> Iterator[None]:
    """Does nothing: a shield for programs that use the library and handle signals themselves."""
    yield
