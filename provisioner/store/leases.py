"""Holds leases: while a command has an environment's lease, no sweep removes that environment.

On this controller a lease is a locked file, which the kernel unlocks however the command ends. For other controllers,
the cloud stores a time that the command renews while it runs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from provisioner.store.locks import locked

RENEW_SECONDS = 120.0
# Several renewals may fail before other controllers consider the environment abandoned.
LEASE = timedelta(minutes=10)


class Leases:
    """The leases that one process holds."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Callable[[], None], contextlib.ExitStack]] = {}
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None

    def take(self, environment_id: str, path: Path, renew: Callable[[], None]) -> None:
        """Takes an environment's lease. Does nothing if this process already has it.

        Args:
            environment_id: the environment.
            path: the file to lock.
            renew: renews the lease in the cloud; called regularly.
        """
        with self._mutex:
            if environment_id in self._held:
                return
            stack = contextlib.ExitStack()
            stack.enter_context(locked(path))
            self._held[environment_id] = (renew, stack)
            if self._thread is None:
                self._thread = threading.Thread(target=self._keep_renewing, name="leases", daemon=True)
                self._thread.start()

    def release(self, environment_id: str) -> None:
        """Gives up an environment's lease. Does nothing if this process does not have it."""
        with self._mutex:
            _, stack = self._held.pop(environment_id, (None, contextlib.ExitStack()))
        stack.close()

    def _keep_renewing(self) -> None:
        pause = threading.Event()
        while not pause.wait(RENEW_SECONDS):
            with self._mutex:
                renewals = [renew for renew, _ in self._held.values()]
            for renew in renewals:
                # Whatever goes wrong with one, the others are renewed, and the next round tries it again.
                with contextlib.suppress(Exception):
                    renew()
