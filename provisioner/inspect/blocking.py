"""Runs our blocking calls in threads, so that Inspect's event loop, asyncio's or trio's, never waits for one."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from provisioner.errors import Interrupted

# The loop's own threads are 40, and shared with Inspect; ours mostly wait for a machine.
CALLS_AT_ONCE = 256
LAUNCHES_AT_ONCE = 64
# Work before a launch mostly computes, so more threads would not end it sooner.
PREPARATIONS_AT_ONCE = 4
# How long a thread keeps the interpreter while others want it. The loop waits for one such turn of each thread that is
# ahead of it, which with Python's own 5 ms and dozens of launches is a tenth of a second and more.
TURN_SECONDS = 0.0005

Result = TypeVar("Result")

_stop: ContextVar[threading.Event | None] = ContextVar("provisioner_stop", default=None)
_limiters: anyio.lowlevel.RunVar[dict[str, anyio.CapacityLimiter]] = anyio.lowlevel.RunVar("provisioner_limiters")


def check() -> None:
    """Raises an exception if the call that this thread works on was cancelled. Ours call it in all long waits.

    Raises:
        Interrupted: it was cancelled.
    """
    stop = _stop.get()
    if stop and stop.is_set():
        raise Interrupted("Inspect cancelled it.")


def _limiter(kind: str, most: int) -> anyio.CapacityLimiter:
    try:
        limiters = _limiters.get()
    except LookupError:
        limiters = {}
        _limiters.set(limiters)
    return limiters.setdefault(kind, anyio.CapacityLimiter(most))


async def call(work: Callable[[], Result]) -> Result:
    """Runs a call in a machine in a thread. If it is cancelled, the call is told to stop, and waited for."""
    return await _run(work, _limiter("calls", CALLS_AT_ONCE), threading.Event())


async def prepare(work: Callable[[], Result]) -> Result:
    """Does the same for what comes before the launch of a sample, as samples may all start at once.

    The work must not wait for another sample: a few that wait would hold up all others.
    """
    return await _run(work, _limiter("preparations", PREPARATIONS_AT_ONCE), threading.Event())


async def launch(work: Callable[[], Result], stop: threading.Event | None = None) -> Result:
    """Does the same for what creates machines or works in them for long, which must not wait for calls in others.

    Args:
        stop: set once it is cancelled, for threads that the work itself starts.
    """
    return await _run(work, _limiter("launches", LAUNCHES_AT_ONCE), stop or threading.Event())


async def score(work: Callable[[], Result]) -> Result:
    """Does the same for what scores machines, which must not wait until others have come up."""
    return await _run(work, _limiter("scores", LAUNCHES_AT_ONCE), threading.Event())


async def end(work: Callable[[], Result]) -> Result:
    """Does the same for what destroys machines: launches may be waiting for what this sets free."""
    return await _run(work, _limiter("ends", LAUNCHES_AT_ONCE), threading.Event())


@cache
def shorten_collections() -> None:
    """Has Python's garbage collector pass over what there is now, once in a process.

    All threads stand still while it looks through all objects: for a third of a second and more with Inspect's modules
    and boto3's descriptions of EC2, which stay as long as the process.
    """
    gc.collect()
    gc.freeze()


def _take_short_turns() -> None:
    if sys.getswitchinterval() > TURN_SECONDS:
        sys.setswitchinterval(TURN_SECONDS)


async def _run(work: Callable[[], Result], limiter: anyio.CapacityLimiter, stop: threading.Event) -> Result:
    _take_short_turns()
    has_ended = False
    results: list[Result] = []
    errors: list[BaseException] = []

    def work_until_stopped() -> None:
        _stop.set(stop)
        try:
            results.append(work())
        except BaseException as error:  # raised again below, where no task group wraps it
            errors.append(error)

    async def tell_of_cancellation() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            if not has_ended:
                stop.set()

    async with limiter, anyio.create_task_group() as group:
        group.start_soon(tell_of_cancellation)
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(work_until_stopped, limiter=anyio.CapacityLimiter(1))
        has_ended = True
        group.cancel_scope.cancel()
    await anyio.lowlevel.checkpoint_if_cancelled()
    if errors:
        raise errors[0]
    return results[0]
