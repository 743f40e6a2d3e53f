"""What runs in this process right now, for whoever watches; and how a run is told to stop."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from provisioner.errors import Interrupted

NOTES = 200


@dataclass
class ActiveRun:
    """A run that is being worked on.

    Args:
        phase, since: what it does, and since when (monotonic seconds).
        attempt: its number, from 1.
        environment: its id, once it has one.
    """

    key: str
    phase: str = "queued"
    since: float = field(default_factory=time.monotonic)
    attempt: int = 1
    environment: str = ""
    stop: threading.Event = field(default_factory=threading.Event)
    shields: int = 0

    def check(self) -> None:
        """Raises Interrupted if the run shall stop and is not clearing away."""
        if self.stop.is_set() and not self.shields:
            raise Interrupted(f"{self.key} was told to stop.")

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """While this lasts, the run is not stopped: it clears away."""
        self.shields += 1
        try:
            yield
        finally:
            self.shields -= 1


class LiveStatus:
    """All runs of this process. Any thread may use it."""

    def __init__(self) -> None:
        self._running: dict[str, ActiveRun] = {}
        self._notes: deque[tuple[str, str]] = deque(maxlen=NOTES)
        self._mutex = threading.Lock()
        self._stopped = False

    @contextlib.contextmanager
    def track(self, key: str) -> Iterator[ActiveRun]:
        """Shows a run as long as it is worked on."""
        running = ActiveRun(key)
        with self._mutex:
            self._running[key] = running
            if self._stopped:
                running.stop.set()
        try:
            yield running
        finally:
            with self._mutex:
                if self._running.get(key) is running:  # it may have been begun again beside this one
                    del self._running[key]

    def running(self) -> list[ActiveRun]:
        """What is being worked on, the longest first."""
        with self._mutex:
            return list(self._running.values())

    def stop(self, key: str) -> None:
        """Tells a run to stop; nothing happens if it is not worked on here."""
        with self._mutex:
            if running := self._running.get(key):
                running.stop.set()

    def stop_all(self) -> None:
        """Tells all runs to stop, and those that are about to begin."""
        with self._mutex:
            self._stopped = True
            for running in self._running.values():
                running.stop.set()

    def note(self, key: str, text: str) -> None:
        """Keeps a line until somebody takes it."""
        with self._mutex:
            self._notes.append((key, text))

    def take_notes(self) -> list[tuple[str, str]]:
        """The lines since the last time, as (run, text)."""
        with self._mutex:
            taken = list(self._notes)
            self._notes.clear()
            return taken


class RunProgress:
    """The progress of one run: it goes to the live_status. A machine's output goes to the logs alone."""

    def __init__(self, live_status: LiveStatus, running: ActiveRun) -> None:
        self._live_status = live_status
        self._running = running

    def phase_started(self, name: str) -> None:
        """Shows the phase."""
        self._running.phase, self._running.since = name, time.monotonic()

    def phase_finished(self, name: str, seconds: float) -> None:
        """Shows nothing: the next one begins."""

    def note(self, text: str) -> None:
        """Passes it on."""
        self._live_status.note(self._running.key, text)

    def output(self, text: str) -> None:
        """Shows nothing: many machines would talk at once."""
