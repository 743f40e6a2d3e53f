"""Passes on what our work reports to Python's logging, which Inspect shows.

Every half minute it says what long work is at, as Inspect shows nothing of it, and at its end how long it took.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from provisioner.printable import beginning, printable
from provisioner.progress import Progress

_log = logging.getLogger("provisioner.inspect")


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


class _Heart:
    """All work of this process, and a thread that tells of it for as long as there is any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: list[_Work] = []
        self._rest = threading.Event()

    def begin(self, work: _Work) -> None:
        with self._lock:
            self._works.append(work)
            if len(self._works) == 1:
                self._rest = threading.Event()
                threading.Thread(target=self._beat, args=(self._rest,), name="heartbeat", daemon=True).start()

    def end(self, work: _Work) -> int:
        """Returns how many are still at work."""
        with self._lock:
            self._works.remove(work)
            if not self._works:
                self._rest.set()
            return len(self._works)

    def _beat(self, rest: threading.Event) -> None:
        while not rest.wait(EVERY_SECONDS):
            with self._lock:
                works = list(self._works)
            if works:
                _log.warning("%s", _line(works))


_heart = _Heart()


@contextmanager
def told(progress: Progress, result: str) -> Iterator[None]:
    """Says what the body is at for as long as it takes, and once it is done, how long it took.

    Its end is shown only if the operator has read of it: machines that are up at once need no line.

    Args:
        progress: the listener of the session that works.
        result: what is then, such as "the machines are up".
    """
    if not isinstance(progress, Listener):
        yield
        return
    work, others = _Work(progress), 0
    _heart.begin(work)
    try:
        yield
    finally:
        others = _heart.end(work)
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
