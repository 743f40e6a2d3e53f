"""Bounds the logs that grow with what a machine does, while their writers append to them. Standard library only.

QEMU cannot bound the file of a serial port, and its warnings can be provoked from inside. So the watchdog trims the
logs, and knows nothing of what is in them.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

SERIAL = "run/serial.log"
# In the machine's directory. Their writers should append (O_APPEND): what others write later leaves a hole before it.
LOGS = (SERIAL, "qemu.log", "network.log", "run/events.out")
LIMIT_BYTES = 1 << 20
KEPT_BYTES = 256 << 10
CUT = b"\n[... cut out: the log was too long ...]\n"


def trim_all(directory: Path) -> None:
    """Trims each log of a machine that takes more than LIMIT_BYTES. Leaves alone what cannot be trimmed."""
    for name in LOGS:
        with contextlib.suppress(OSError):
            trim(directory / name)


def trim(path: Path) -> None:
    """Cuts a log that takes more than LIMIT_BYTES down to KEPT_BYTES from its beginning and as many from its end.

    What is appended while it works may be lost; nothing that was there before can be overwritten by it.

    Raises:
        OSError: the log is missing, is a link, or cannot be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        taken_bytes = min(status.st_size, status.st_blocks * 512)
        if stat.S_ISREG(status.st_mode) and taken_bytes > LIMIT_BYTES:
            end = os.pread(descriptor, KEPT_BYTES, status.st_size - KEPT_BYTES)
            os.pwrite(descriptor, CUT + end, KEPT_BYTES)
            os.ftruncate(descriptor, KEPT_BYTES + len(CUT) + len(end))
    finally:
        os.close(descriptor)
