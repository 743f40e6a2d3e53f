"""Which runs this process is working on right now, for the display; and how a run is told to stop."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from provisioner.base.errors import Interrupted

MAX_NOTES = 200
# How much of the output of each run is kept for the display.
OUTPUT_CHARACTERS = 1000


@dataclass
class ActiveRun:
    """A run that this process is working on.

    Args:
        key: the batch's id and the run's key, as BATCH/KEY.
        phase: what it is doing.
        attempt: the attempt's number, from 1.
        output: the end of what its machines have said in this phase.
        stop: set once the run has been told to stop.
        shields: how many clean-ups are in progress; while there are any, the run is not stopped.
    """

    key: str
    phase: str = "queued"
    attempt: int = 1
    output: str = ""
    stop: threading.Event = field(default_factory=threading.Event)
    shields: int = 0

    def check(self) -> None:
        """Raises Interrupted if the run has been told to stop and is not cleaning up."""
        if self.stop.is_set() and not self.shields:
            raise Interrupted(f"{self.key} was told to stop.")

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """Keeps the run from being stopped while it cleans up."""
        self.shields += 1
        try:
            yield
        finally:
            self.shields -= 1


class LiveStatus:
    """The active runs of this process. Safe to use from any thread."""

    def __init__(self) -> None:
        self._runs: dict[str, ActiveRun] = {}
        self._notes: deque[tuple[str, str]] = deque(maxlen=MAX_NOTES)
        self._mutex = threading.Lock()
        self._stopped = False

    @contextlib.contextmanager
    def track(self, key: str) -> Iterator[ActiveRun]:
        """Lists a run as active for as long as it is being worked on."""
        active_run = ActiveRun(key)
        with self._mutex:
            self._runs[key] = active_run
            if self._stopped:
                active_run.stop.set()
        try:
            yield active_run
        finally:
            with self._mutex:
                # The same run may have been started again before this one ended.
                if self._runs.get(key) is active_run:
                    del self._runs[key]

    def active_runs(self) -> list[ActiveRun]:
        """Returns the active runs, in the order in which they were started."""
        with self._mutex:
            return list(self._runs.values())

    def stop(self, key: str) -> None:
        """Tells a run to stop; does nothing if it is not active in this process."""
        with self._mutex:
            if active_run := self._runs.get(key):
                active_run.stop.set()

    def stop_all(self) -> None:
        """Tells all active runs to stop, and every run that starts later."""
        with self._mutex:
            self._stopped = True
            for active_run in self._runs.values():
                active_run.stop.set()

    def note(self, key: str, text: str) -> None:
        """Keeps a line about a run until `take_notes` is called; only the latest 200 are kept."""
        with self._mutex:
            self._notes.append((key, text))

    def take_notes(self) -> list[tuple[str, str]]:
        """Returns the lines since the last call, as pairs of the run's key and the text."""
        with self._mutex:
            notes = list(self._notes)
            self._notes.clear()
            return notes


class RunProgress:
    """Reports one run's progress to the live status, which keeps the end of the machines' output: the logs have it."""

    def __init__(self, live_status: LiveStatus, active_run: ActiveRun) -> None:
        self._live_status = live_status
        self._active_run = active_run

    def phase_started(self, name: str) -> None:
        """Shows the phase."""
        self._active_run.phase, self._active_run.output = name, ""

    def phase_finished(self, name: str, seconds: float) -> None:
        """Does nothing: the next phase replaces this one."""

    def note(self, text: str) -> None:
        """Keeps the line for the display."""
        self._live_status.note(self._active_run.key, text)

    def output(self, text: str) -> None:
        """Keeps its end for the display: all the output of many machines could not be read."""
        kept = self._active_run.output + text[-OUTPUT_CHARACTERS:]
        self._active_run.output = kept[-OUTPUT_CHARACTERS:]
