"""Handles Ctrl-C and SIGTERM: the first raises KeyboardInterrupt, and later ones do not interrupt the clean-up."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# After this many signals during a clean-up the process ends at once, whatever has not been removed yet.
INSISTENCE = 3


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """Returns the exit code after an interruption: 128 and the signal's number, as shells report it."""
    name = interrupt.args[0] if interrupt.args else signal.SIGINT.name
    return 128 + signal.Signals[name]


def interrupt_in(error: BaseException) -> KeyboardInterrupt | None:
    """Returns the interruption that an error is, or that it wraps; None if there is none.

    Python 3.11 wraps what `__set_name__` raises in a RuntimeError, also a KeyboardInterrupt while a class is made.
    """
    seen: set[int] = set()  # an exception may be its own cause
    cause: BaseException | None = error
    while cause and id(cause) not in seen:
        if isinstance(cause, KeyboardInterrupt):
            return cause
        seen.add(id(cause))
        cause = cause.__cause__
    return None


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

    def _handle(self, number: int, _: FrameType | None) -> None:
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
