"""Runs our blocking calls in threads, and tells Inspect's operator of them.

Inspect's event loop, asyncio's or trio's, never waits for one.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from provisioner.base.errors import Interrupted
from provisioner.base.printable import printable
from provisioner.base.progress import Progress

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


async def call(work: Callable[[], Result]) -> Result:
    """Runs a call in a machine in a thread. If it is cancelled, the call is told to stop, and waited for."""
    return await _run("calls", CALLS_AT_ONCE, work)


async def prepare(work: Callable[[], Result]) -> Result:
    """Runs what comes before the launch of a sample in a thread, a few at once: samples may all start together.

    The work must not wait for another sample: a few that wait would hold up all others.
    """
    return await _run("preparations", PREPARATIONS_AT_ONCE, work)


async def launch(work: Callable[[], Result], stop: threading.Event | None = None) -> Result:
    """Runs what creates machines or works in them for long in a thread, beside calls in others.

    Args:
        stop: set once it is cancelled, for threads that the work itself starts.
    """
    return await _run("launches", LAUNCHES_AT_ONCE, work, stop)


async def score(work: Callable[[], Result]) -> Result:
    """Runs what scores machines in a thread, beside launches: it must not wait until others have come up."""
    return await _run("scores", LAUNCHES_AT_ONCE, work)


async def look(work: Callable[[], Result]) -> Result:
    """Runs what looks into records, or asks whether there is room, in a thread: launches may be waiting for it."""
    return await _run("looks", LAUNCHES_AT_ONCE, work)


async def end(work: Callable[[], Result]) -> Result:
    """Runs what destroys machines in a thread, beside launches, which may be waiting for what this sets free."""
    return await _run("ends", LAUNCHES_AT_ONCE, work)


@cache
def shorten_collections() -> None:
    """Excludes all objects that there are now from garbage collection, once in a process.

    All threads stand still while it looks through all objects: for a third of a second and more with Inspect's modules
    and boto3's descriptions of EC2, which stay as long as the process.
    """
    gc.collect()
    gc.freeze()


async def _run(kind: str, most: int, work: Callable[[], Result], stop: threading.Event | None = None) -> Result:
    if sys.getswitchinterval() > TURN_SECONDS:
        sys.setswitchinterval(TURN_SECONDS)
    limiters = _limiters.get({})
    _limiters.set(limiters)
    limiter = limiters.setdefault(kind, anyio.CapacityLimiter(most))
    stop = stop or threading.Event()
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


_log = logging.getLogger("provisioner.inspect")


# Hundreds of samples need not say the same.
SAID: deque[tuple[str, ...]] = deque(maxlen=1000)
_said_lock = threading.Lock()


def is_new(*words: str) -> bool:
    """Returns whether this process says something for the first time, as far as it remembers, and remembers it."""
    with _said_lock:
        if words in SAID:
            return False
        SAID.append(words)
        return True


class Listener:
    """Reports the phases and notes of one sample.

    Args:
        label: says which sample.

    Attributes:
        label: the same, safe for a terminal.
    """

    def __init__(self, label: str) -> None:
        self.label = printable(label)

    def phase_started(self, name: str) -> None:
        """Reports that a phase begins."""
        _log.debug("%s: %s", self.label, name)

    def phase_finished(self, name: str, seconds: float) -> None:
        """Reports that a phase succeeded, and how long it took."""
        _log.info("%s: %s took %.1f s", self.label, name, seconds)

    def note(self, text: str) -> None:
        """Reports one line of text: what takes long, waits or fails. Inspect shows warnings unless told otherwise."""
        _log.warning("%s: %s", self.label, printable(text))

    def output(self, text: str) -> None:
        """Ignores it: the environment's logs keep all output."""


# What takes longer is told where phases are not.
LONG_SECONDS = 30.0


@contextmanager
def reporting(progress: Progress, result: str) -> Iterator[None]:
    """Says how long the body took, once it is done: as a warning if that was long.

    Args:
        progress: the listener of the session that works.
        result: what is then, such as "the machines are up".
    """
    begin = time.monotonic()
    yield
    seconds = time.monotonic() - begin
    if isinstance(progress, Listener):
        level = logging.WARNING if seconds >= LONG_SECONDS else logging.INFO
        _log.log(level, "%s: %s after %.0f s", progress.label, result, seconds)
