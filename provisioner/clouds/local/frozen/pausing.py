"""Pauses a machine for a moment, and makes sure that it resumes, even if the pausing process dies.

A file in the machine's directory says that it is paused; the pausing process holds a lock on the file. If no process
does, the machine's watchdog resumes the machine. Standard library only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from provisioner.clouds.local.vm import qemu
from provisioner.store.locks import is_locked, locked

PAUSED_FILE = "paused"
ANSWER_SECONDS = 10.0
# How long QEMU may take to give up what it was writing.
GIVING_UP_SECONDS = 10.0


@contextlib.contextmanager
def held(directory: Path) -> Iterator[qemu.QMP]:
    """Yields a control connection to a running machine, over which it may be paused; it resumes afterwards.

    Args:
        directory: the machine's.

    Raises:
        OSError, qemu.QMPError: QEMU does not answer, or does not resume the machine.
    """
    paused, new = directory / PAUSED_FILE, directory / f"{PAUSED_FILE}.new"
    with locked(new):
        new.rename(paused)  # under this name it was never unlocked
        with qemu.QMP(directory, ANSWER_SECONDS) as qmp:
            try:
                yield qmp
            finally:
                _resume(qmp)
                paused.unlink(missing_ok=True)


def _resume(qmp: qemu.QMP) -> None:
    qmp.execute("migrate_cancel")
    deadline = time.monotonic() + GIVING_UP_SECONDS
    while _is_writing(qmp) and time.monotonic() < deadline:
        time.sleep(0.02)
    qmp.execute("cont")


def _is_writing(qmp: qemu.QMP) -> bool:
    status = qmp.execute("query-status")
    return isinstance(status, dict) and status.get("status") == "finish-migrate"


def end_if_abandoned(directory: Path, timeout_seconds: float) -> None:
    """Resumes a machine if the process that paused it has ended without doing so.

    Args:
        directory: the machine's.
        timeout_seconds: how long to wait for each of QEMU's answers.

    Raises:
        OSError, qemu.QMPError: QEMU does not answer, or refuses.
    """
    paused = directory / PAUSED_FILE
    if paused.exists() and not is_locked(paused):
        with qemu.QMP(directory, timeout_seconds) as qmp:
            _resume(qmp)
        paused.unlink(missing_ok=True)
