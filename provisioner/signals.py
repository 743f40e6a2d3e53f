"""Ctrl-C and SIGTERM: one becomes KeyboardInterrupt in the main thread, cleaning up is not cut short by the next."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# So many signals during a clean-up mean that the operator wants out, whatever stays behind in the records.
INSISTENCE = 3


class Interrupts:
    """Handles the process's signals. Must be made in the main thread.

    Args:
        tell: shows one line to the operator.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._shields = 0
        self._ignored = 0

    def install(self) -> None:
        """Takes over the signals."""
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._shields and self._ignored + 1 < INSISTENCE:
            self._ignored += 1
            left = INSISTENCE - self._ignored
            self._tell(f"Cleaning up; {left} more to leave at once (`provisioner destroy --all` then does the rest).")
            return
        raise KeyboardInterrupt(signal.Signals(number).name)

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """While this lasts, signals are noted and not obeyed, unless the operator insists."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1


def go_on() -> None:
    """For whoever is only stopped by signals."""


@contextlib.contextmanager
def no_shield() -> Iterator[None]:
    """For a library user whose program handles its signals itself."""
    yield
