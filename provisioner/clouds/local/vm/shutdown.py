"""Lets QEMU itself record why it shuts down, and reads that: no process has to watch it. Standard library only.

QEMU takes commands from the file run/events.in and writes QMP's events to run/events.out, in the machine's directory.
If it ends without a word, the kernel may have killed it when out of memory, which its machine can bring about: the
kernel counts such kills. Or the host lost its power or was reset: then the kernel has another boot id. Otherwise
nothing tells whether the machine has crashed its QEMU.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from provisioner.base.printable import encodable
from provisioner.store.files import open_plain

# QEMU's chardev `pipe` opens PATH.in and PATH.out, which may be plain files (QEMU's documentation, -chardev pipe).
ARGUMENTS = ("-chardev", "pipe,id=events,path=run/events", "-mon", "chardev=events,mode=control")
COMMANDS, EVENTS = "run/events.in", "run/events.out"
# The count of such kills before QEMU starts, and the host's boot id.
KILLS, BOOT = "oom_kills", "boot_id"
VMSTAT, BOOT_ID = Path("/proc/vmstat"), Path("/proc/sys/kernel/random/boot_id")
# A guest that reboots again and again writes an event each time, and the watchdog trims them; the last is at the end.
READ_BYTES = 64 << 10
REASON_CHARACTERS = 200


def prepare(directory: Path) -> None:
    """Writes the files that QEMU opens, the kernel's count and the host's boot id, before it starts.

    Without the command QEMU sends no events.
    """
    (directory / COMMANDS).parent.mkdir(mode=0o700, exist_ok=True)
    (directory / COMMANDS).write_text('{"execute": "qmp_capabilities"}\n')
    (directory / EVENTS).write_bytes(b"")
    kills = _kills()
    (directory / KILLS).write_text("" if kills is None else str(kills))
    (directory / BOOT).write_text(_read(BOOT_ID))


def _kills() -> int | None:
    """Returns how many processes this host's kernel has killed when out of memory; None if it does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in VMSTAT.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None


def _noted_kills(directory: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int((directory / KILLS).read_text())
    return None


def _read(path: Path) -> str:
    """Returns a small file's text; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return path.read_text()
    return ""


def reason(directory: Path) -> tuple[str, bool | None]:
    """Returns why a machine no longer runs, and whether that can be its own doing; None if the host cannot tell."""
    try:
        with open_plain(directory / EVENTS) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - READ_BYTES))
            events = file.read(READ_BYTES)
    except OSError:
        return "its files were removed on this host", False
    boots = {_read(directory / BOOT), _read(BOOT_ID)}
    rebooted = len(boots) == 2 and "" not in boots
    return explain(events, _noted_kills(directory), _kills(), rebooted=rebooted)


def explain(
    events: bytes, kills_before: int | None, kills_now: int | None, *, rebooted: bool
) -> tuple[str, bool | None]:
    """Decides why a machine no longer runs, and whether that can be its own doing; None if the host cannot tell. Pure.

    Args:
        events: the last of what QEMU wrote.
        kills_before, kills_now: how many processes the kernel had killed when out of memory before QEMU started, and
            has by now; None if unknown.
        rebooted: whether the host has booted since QEMU started.
    """
    for line in reversed(events.splitlines()):
        try:
            event = json.loads(line)
            if event.get("event") == "SHUTDOWN":
                said = encodable(str(event["data"]["reason"])[:REASON_CHARACTERS])
                return f"QEMU says {said}", bool(event["data"]["guest"])
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ):  # a taken-over QEMU writes anything
            continue
    if rebooted:
        return "the host was restarted", False
    if kills_before is not None and kills_now is not None and kills_now > kills_before:
        return "the host ran out of memory and killed a process", True
    return "QEMU crashed or was killed", None
