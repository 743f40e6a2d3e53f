"""Runs our blocking calls in threads, and tells Inspect's operator what long ones are at.

Inspect's event loop, asyncio's or trio's, never waits for one.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from provisioner.base.errors import Interrupted
from provisioner.base.printable import beginning, printable
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
        at: the phase or note that was reported last.
        notes: how many notes were reported.
    """

    def __init__(self, label: str) -> None:
        self.label = printable(label)
        self.at = "beginning"
        self.notes = 0

    def phase_started(self, name: str) -> None:
        """Reports that a phase begins."""
        self.at = name
        _log.debug("%s: %s", self.label, name)

    def phase_finished(self, name: str, seconds: float) -> None:
        """Reports that a phase succeeded, and how long it took."""
        _log.info("%s: %s took %.1f s", self.label, name, seconds)

    def note(self, text: str) -> None:
        """Reports one line of text: what takes long, waits or fails. Inspect shows warnings unless told otherwise."""
        self.at = printable(text)
        self.notes += 1
        _log.warning("%s: %s", self.label, self.at)

    def output(self, text: str) -> None:
        """Ignores it: the environment's logs keep all output."""


EVERY_SECONDS = 30.0
# Of many works' phases, in one line; and the characters of one that is a note.
MOST_PHASES = 3
MOST_CHARACTERS = 120
# While more are at work than this, no line says that one of them is done.
MOST_ENDS = 10


class _Work:
    """One piece of long work: a sample that comes up, or images that are built."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self._notes_before = listener.notes
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def was_seen(self) -> bool:
        """Whether the operator has read of it, and should read of its end."""
        return self.seconds >= EVERY_SECONDS or self.listener.notes > self._notes_before


# All work of this process. A thread tells of it for as long as there is any.
_works: list[_Work] = []
_works_lock = threading.Lock()
_rest = threading.Event()


def _tell_of_works(rest: threading.Event) -> None:
    while not rest.wait(EVERY_SECONDS):
        with _works_lock:
            works = list(_works)
        if works:
            _log.warning("%s", _line(works))


@contextmanager
def reporting(progress: Progress, result: str) -> Iterator[None]:
    """Says what the body is at for as long as it takes, and once it is done, how long it took.

    Its end is shown only if the operator has read of it: machines that are up at once need no line.

    Args:
        progress: the listener of the session that works.
        result: what is then, such as "the machines are up".
    """
    global _rest
    if not isinstance(progress, Listener):
        yield
        return
    work = _Work(progress)
    with _works_lock:
        _works.append(work)
        if len(_works) == 1:
            _rest = threading.Event()
            threading.Thread(target=_tell_of_works, args=(_rest,), name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        with _works_lock:
            _works.remove(work)
            others = len(_works)
            if not others:
                _rest.set()
    level = logging.WARNING if work.was_seen and others < MOST_ENDS else logging.INFO
    _log.log(level, "%s: %s after %.0f s", progress.label, result, work.seconds)


def _line(works: Sequence[_Work]) -> str:
    """Returns one line for all that is at work. Bounded: a note may be long."""
    seconds = max(work.seconds for work in works)
    phases = Counter(beginning(work.listener.at, MOST_CHARACTERS) for work in works)
    if len(works) == 1:
        return f"{works[0].listener.label}: at work for {seconds:.0f} s; now: {next(iter(phases))}"
    shown = ", ".join(f"{phase} ({count})" for phase, count in phases.most_common(MOST_PHASES))
    more = ", and others" if len(phases) > MOST_PHASES else ""
    return f"{len(works)} samples at work, the longest for {seconds:.0f} s; now: {shown}{more}"
