"""Handles Ctrl-C and SIGTERM: the first raises KeyboardInterrupt, and later ones do not interrupt the clean-up."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# After this many signals during a clean-up the process ends at once, whatever has not been removed yet.
INSISTENCE = 3
# How long a signal is postponed where Python would not let a KeyboardInterrupt pass.
POSTPONED_SECONDS = 0.01


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """Returns the exit code after an interruption: 128 and the signal's number, as shells report it."""
    return 128 + _signal_of(interrupt)


def _signal_of(interrupt: KeyboardInterrupt) -> signal.Signals:
    """Returns the signal that caused an interruption; Python's own handler, of SIGINT, does not name it."""
    return signal.Signals[interrupt.args[0]] if interrupt.args else signal.SIGINT


class Interrupts:
    """Handles the process's signals. Must be created in the main thread.

    Args:
        tell: shows a line to the operator.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._shields = 0
        self._ignored = 0
        self._previous_hook = sys.unraisablehook

    def install(self) -> None:
        """Installs the signal handlers, and a sys.unraisablehook for signals whose KeyboardInterrupt Python drops."""
        for number in SIGNALS:
            signal.signal(number, self._handle)
        if sys.unraisablehook != self._tell_unraisable:
            self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._tell_unraisable

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handles signals while the body runs, in a process that has handlers and a hook of its own."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        self.install()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            if sys.unraisablehook == self._tell_unraisable:
                sys.unraisablehook = self._previous_hook

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if _is_in_set_name(frame) and _postpone(number):
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

    def _tell_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Sends a signal again whose KeyboardInterrupt Python dropped, as in finalizers and weakref callbacks."""
        error = unraisable.exc_value
        if not (isinstance(error, KeyboardInterrupt) and _postpone(_signal_of(error))):
            self._previous_hook(unraisable)

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """Ignores signals while the body runs, unless the operator repeats them several times."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1


def _postpone(number: int) -> bool:
    """Sends a signal again a moment later; returns whether that is possible."""

    def send() -> None:
        time.sleep(POSTPONED_SECONDS)
        os.kill(os.getpid(), number)

    try:
        _thread.start_new_thread(send, ())  # threading's own locks may be held here
    except RuntimeError:  # as many threads as there may be, or Python is about to end
        return False
    return True


def _is_in_set_name(frame: FrameType | None) -> bool:
    """Tells whether a class is being made. Python 3.11 wraps what `__set_name__` raises in a RuntimeError."""
    while frame:
        if frame.f_code.co_name == "__set_name__":
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
