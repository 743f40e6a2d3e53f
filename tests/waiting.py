"""Waits for events. The one bound here only ends what hangs: no test depends on it, and no host is too slow for it."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep  # by name: a test may give a module another clock
from typing import TypeVar

BOUND_SECONDS = 300.0
PAUSE_SECONDS = 0.01

Value = TypeVar("Value")


async def until_in_loop(condition: Callable[[], Value]) -> Value:
    """Does as `until` in an event loop, asyncio's or trio's, which keeps running."""
    import anyio

    with anyio.fail_after(BOUND_SECONDS):
        while not (value := condition()):
            await anyio.sleep(PAUSE_SECONDS)
    return value


def until(condition: Callable[[], Value], while_alive: Callable[[], bool] | None = None) -> Value:
    """Waits until a condition holds, and returns what it then returned.

    Args:
        while_alive: whether what is to make it true can still do so; waiting ends with it.
    """
    deadline = monotonic() + BOUND_SECONDS
    while True:
        is_alive = while_alive is None or while_alive()  # before the look: its last act counts
        if value := condition():
            return value
        assert is_alive, "what was waited for cannot happen any more"
        assert monotonic() < deadline, f"what was waited for did not happen within {BOUND_SECONDS:g} s"
        sleep(PAUSE_SECONDS)
