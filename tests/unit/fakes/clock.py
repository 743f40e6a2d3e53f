"""A clock whose time passes when a caller waits."""

from __future__ import annotations

from collections.abc import Callable


class WaitingClock:
    """Takes the place of the module `time`.

    Args:
        waited: called after each wait with the seconds since the beginning.
    """

    def __init__(self, waited: Callable[[float], None] = lambda _: None) -> None:
        self.seconds = 0.0
        self._waited = waited

    def monotonic(self) -> float:
        """Returns the seconds since the beginning."""
        return self.seconds

    def sleep(self, seconds: float) -> None:
        """Lets seconds pass at once."""
        self.seconds += seconds
        self._waited(self.seconds)
