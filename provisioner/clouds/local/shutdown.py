"""Lets QEMU itself record why it shuts down, and reads that: no process has to watch it. Standard library only.

QEMU takes commands from the file events.in and writes QMP's events to events.out, in the machine's directory.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

# QEMU's chardev `pipe` opens PATH.in and PATH.out, which may be plain files (QEMU's documentation, -chardev pipe).
ARGUMENTS = ("-chardev", "pipe,id=events,path=events", "-mon", "chardev=events,mode=control")
COMMANDS, EVENTS = "events.in", "events.out"
# A guest that reboots again and again writes an event each time, and the watchdog trims them; the last is at the end.
READ_BYTES = 64 << 10


def prepare(directory: Path) -> None:
    """Writes the files that QEMU opens, before it starts. Without the command it sends no events."""
    (directory / COMMANDS).write_text('{"execute": "qmp_capabilities"}\n')
    (directory / EVENTS).write_bytes(b"")


def reason(directory: Path) -> tuple[str, bool]:
    """Returns why a machine no longer runs, in QEMU's words, and whether it was switched off from within."""
    try:
        with (directory / EVENTS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - READ_BYTES))
            lines = file.read(READ_BYTES).splitlines()
    except OSError:
        return "somebody on this host removed it", False
    for line in reversed(lines):
        try:
            event = json.loads(line)
            if event.get("event") == "SHUTDOWN":
                return f"QEMU says {event['data']['reason']}", bool(event["data"]["guest"])
        except (ValueError, LookupError, TypeError, AttributeError):
            continue
    return "QEMU crashed or was killed", False
