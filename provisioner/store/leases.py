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
# How long it waits for another process before it looks whether the lease is still wanted.
ROUND_SECONDS = 1.0
# Several renewals may fail before other controllers consider the environment abandoned.
LEASE = timedelta(minutes=10)


class Leases:
    """The leases that one process holds."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Callable[[], None], contextlib.ExitStack]] = {}
        # The takes that wait for a file's lock, each with a mark of its own.
        self._taking: dict[str, object] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def take(self, environment_id: str, path: Path, renew: Callable[[], None]) -> None:
        """Takes an environment's lease, and waits while another process has it.

        Does nothing if this process already has it, or if another thread releases it during the wait.

        Args:
            environment_id: the environment.
            path: the file to lock.
            renew: renews the lease in the cloud; called regularly.
        """
        mark = object()
        with self._changed:
            self._changed.wait_for(lambda: environment_id not in self._taking)
            if environment_id in self._held:
                return
            self._taking[environment_id] = mark
        try:
            while self._taking.get(environment_id) is mark:  # else it was released during the wait
                with contextlib.ExitStack() as stack:
                    try:
                        stack.enter_context(locked(path, wait_seconds=ROUND_SECONDS))
                    except TimeoutError as error:
                        if error.errno is not None:  # the file system's, not the lock's
                            raise
                        continue
                    with self._changed:
                        if self._taking.get(environment_id) is mark:
                            self._held[environment_id] = (renew, stack.pop_all())
                            self._begin_renewing()
                            return
        finally:
            with self._changed:
                if self._taking.get(environment_id) is mark:
                    del self._taking[environment_id]
                self._changed.notify_all()

    def held(self) -> list[str]:
        """Returns the ids of the environments whose leases this process has."""
        with self._changed:
            return list(self._held)

    def _begin_renewing(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_renewing, name="leases", daemon=True)
            self._thread.start()

    def release(self, environment_id: str) -> None:
        """Gives up an environment's lease, also one that a thread still waits for. Does nothing if there is none."""
        with self._changed:
            self._taking.pop(environment_id, None)
            self._changed.notify_all()
            _, stack = self._held.pop(environment_id, (None, contextlib.ExitStack()))
        stack.close()

    def _keep_renewing(self) -> None:
        pause = threading.Event()
        while not pause.wait(RENEW_SECONDS):
            with self._changed:
                if not self._held:
                    self._thread = None
                    return
                renewals = [renew for renew, _ in self._held.values()]
            for renew in renewals:
                # Whatever goes wrong with one, the others are renewed, and the next round tries it again.
                with contextlib.suppress(Exception):
                    renew()
