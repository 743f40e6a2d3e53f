"""Ends a local machine when its time to live is over, whatever the controller or the machine's root do.

One small process per machine, which starts before QEMU and ends with it. If the directory is removed while the machine
runs, the machine ends. The watchdog also keeps the machine's logs and captures short, ends the machine if it has filled
the host's disk, resumes it if QEMU paused it because others had or if the process that froze it was killed, and tells
it what it asks for at each boot. The file `expires_at` in the machine's directory, its working directory, says when the
machine ends: seconds since the epoch. To move it, replace the file. Standard library only.

Usage: python -m provisioner.clouds.local.watchdog
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from functools import partial
from pathlib import Path

from provisioner.clouds.local import machine
from provisioner.clouds.local.frozen import snapshots
from provisioner.clouds.local.network import captures, egress
from provisioner.clouds.local.vm import disk, machine_logs, qemu
from provisioner.clouds.local.vm.credential_port import CredentialPort

EXPIRY = "expires_at"
# How often it looks. Meanwhile the machine may write to its logs without a bound: half a mebibyte or so.
LOOK_SECONDS = 0.5
# QEMU starts a moment later.
START_SECONDS = 120.0
START_PAUSE_SECONDS = 0.05
# How often it asks QEMU whether the machine is paused, and how long it waits for that: logs grow meanwhile.
RESUME_SECONDS = 10.0
ANSWER_SECONDS = 1.0


def main() -> int:
    """Waits until the machine expires or QEMU ends, whichever comes first."""
    pidfile = Path(qemu.PIDFILE)
    directory = Path.cwd()
    deadline = time.monotonic() + START_SECONDS
    seen = False
    watched: int | None = None
    asked_at = time.monotonic()
    port = CredentialPort(directory)
    captured = captures.Captures(directory, ANSWER_SECONDS)
    while True:
        machine_logs.trim_all(Path())
        grows_fast = captured.look()
        egress.follow_resolvers(directory)
        pid = qemu.live_pid(pidfile)
        if watched is None and pid is not None:
            watched = _opened(pid, pidfile)
        seconds_left = _seconds_left()
        if pid is None:
            if _is_over(watched, seconds_left, may_start=not seen and time.monotonic() < deadline):
                return 0
            time.sleep(START_PAUSE_SECONDS)
        elif seconds_left is None or seconds_left <= 0:
            seen = True
            if not _end(pidfile, watched):
                time.sleep(LOOK_SECONDS)
        elif _must_go(directory):
            seen = True
            disk.evict(directory, partial(_end, pidfile, watched))
        else:
            seen = True
            is_due = time.monotonic() - asked_at > RESUME_SECONDS
            _resume(directory, is_due)
            asked_at = time.monotonic() if is_due else asked_at
            pause = START_PAUSE_SECONDS if not port.connect() else LOOK_SECONDS
            _wait_for(pid, port, min(seconds_left, captures.FAST_LOOK_SECONDS if grows_fast else pause))
            port.serve()


def _opened(pid: int, pidfile: Path) -> int | None:
    """Returns a descriptor of QEMU, by which it can be ended if its directory is gone; None if it has just ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # it has just ended, or cannot be told
        return None
    if qemu.live_pid(pidfile) == pid:
        return descriptor
    os.close(descriptor)  # by now, another process may have the number
    return None


def _is_over(watched: int | None, seconds_left: float | None, *, may_start: bool) -> bool:
    """Returns whether there is nothing more to watch: no QEMU lives, nor may be about to start."""
    # If the host's disk is nearly full, too: no other watchdog counts a QEMU that no directory names.
    if seconds_left is None or seconds_left <= 0 or disk.nearly_full(Path()):
        _kill(watched)
    lives = watched is not None and not select.select([watched], [], [], 0)[0]
    return seconds_left is None or not (may_start or lives)


def _kill(watched: int | None) -> None:
    """Ends QEMU by its descriptor, if it still lives: its directory may be gone, or not name it."""
    if watched is not None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(watched, signal.SIGKILL)


def _end(pidfile: Path, watched: int | None) -> bool:
    """Ends the machine. Returns whether that worked; if not, the next round tries again."""
    with contextlib.suppress(machine.MachineError, OSError):
        machine.end(lambda: qemu.live_pid(pidfile))
        _kill(watched)  # which may only have stopped to say that it lives
        return True
    _kill(watched)
    return False


def _must_go(directory: Path) -> bool:
    with contextlib.suppress(OSError):
        return disk.must_go(directory)
    return False


def _resume(directory: Path, after_full_disk: bool) -> None:
    """Resumes a machine whose freezing process died, or that QEMU paused while the host's disk was full."""
    # Where QEMU is busy with another client, or the system itself, a later round tries again.
    with contextlib.suppress(OSError, ValueError, qemu.QMPError):
        snapshots.end_if_abandoned(directory, ANSWER_SECONDS)
    with contextlib.suppress(OSError, ValueError, qemu.QMPError):
        if after_full_disk and not disk.nearly_full(directory):
            with qemu.QMP(directory, ANSWER_SECONDS) as qmp:
                if qmp.status() == qemu.FULL_DISK:
                    qmp.execute("cont")  # QEMU then repeats what it could not write


def _seconds_left() -> float | None:
    """Seconds until the machine expires; None if its file is gone."""
    try:
        return float(Path(EXPIRY).read_text()) - time.time()
    except (OSError, ValueError):
        return None


def _wait_for(pid: int, port: CredentialPort, seconds: float) -> None:
    """Waits for a process to end or the machine to ask for something, at most so many seconds."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # it has just ended, or cannot be told
        time.sleep(min(seconds, START_PAUSE_SECONDS))
        return
    try:
        readable, writable = port.waits_for()
        select.select([descriptor, *(each.fileno() for each in readable)], writable, [], seconds)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
