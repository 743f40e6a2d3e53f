"""Ends a local machine at its limit, whatever became of the controller, and whatever the machine's root did inside.

One small process per machine, started before QEMU and gone with it. The file `limit` in the machine's directory, its
working directory, says when: seconds since the epoch. Whoever moves the limit replaces the file. Standard library only.

Usage: python -m provisioner.clouds.local.watchdog
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from pathlib import Path

from provisioner.clouds.local import machine, qemu

EXPIRY = "expires_at"
# Clocks are set, and files replaced, while it waits.
LOOK_SECONDS = 30.0
# QEMU starts a moment after it.
START_SECONDS = 120.0
PAUSE_SECONDS = 0.5


def main() -> int:
    """Waits for the limit or for QEMU's end, whichever comes first."""
    pidfile = Path("qemu.pid")
    give_up = time.monotonic() + START_SECONDS
    seen = False
    while True:
        pid = qemu.live_pid(pidfile)
        left = _seconds_left()
        if pid is None:
            # Without a limit there is no directory any more.
            if seen or left is None or time.monotonic() > give_up:
                return 0
            time.sleep(PAUSE_SECONDS)
        elif left is None or left <= 0:
            seen = True
            with contextlib.suppress(machine.MachineError):  # then the next round tries again
                machine.end(lambda: qemu.live_pid(pidfile))
        else:
            seen = True
            _wait_for(pid, min(left, LOOK_SECONDS))


def _seconds_left() -> float | None:
    """Until the limit; None: there is none any more."""
    try:
        return float(Path(EXPIRY).read_text()) - time.time()
    except (OSError, ValueError):
        return None


def _wait_for(pid: int, seconds: float) -> None:
    """Waits for a process's end, for so long at most."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # it has just ended
        return
    try:
        select.select([descriptor], [], [], seconds)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
