"""Leases: a command's sign that it looks after an environment, so that no sweep takes it away.

On this controller a lease is a locked file, which the kernel frees however the command ends. In the cloud, where other
controllers look, it is a time that is renewed as long as the command lives.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from provisioner.errors import ProvisionerError
from provisioner.store.locks import locked

RENEW_SECONDS = 120.0
# Several renewals may fail before others take the environment for abandoned.
LEASE = timedelta(minutes=10)


class Leases:
    """The leases of one process."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Callable[[], None], contextlib.ExitStack]] = {}
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None

    def take(self, environment_id: str, path: Path, renew: Callable[[], None]) -> None:
        """Looks after an environment from now on. Again makes no difference.

        Args:
            path: the file that is locked.
            renew: tells the cloud so, again and again.
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
        """Looks after it no more."""
        with self._mutex:
            _, stack = self._held.pop(environment_id, (None, contextlib.ExitStack()))
        stack.close()

    def _keep_renewing(self) -> None:
        pause = threading.Event()
        while not pause.wait(RENEW_SECONDS):
            with self._mutex:
                renewals = [renew for renew, _ in self._held.values()]
            for renew in renewals:
                # A cloud that cannot be asked now is asked again.
                with contextlib.suppress(ProvisionerError, OSError):
                    renew()
