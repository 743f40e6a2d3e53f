"""Why a local machine ended, as QEMU records it."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from provisioner.clouds.local import qemu, shutdown

GREETING = '{"QMP": {"version": {}}}\n{"return": {}}\n'


def event(name: str, guest: str, reason: str) -> str:
    return f'{{"event": "{name}", "data": {{"guest": {guest}, "reason": "{reason}"}}}}\n'


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (GREETING + event("SHUTDOWN", "true", "guest-shutdown"), ("QEMU says guest-shutdown", True)),
        (GREETING + event("SHUTDOWN", "false", "host-signal"), ("QEMU says host-signal", False)),
        (event("RESET", "true", "guest-reset") * 9999 + event("SHUTDOWN", "true", "x"), ("QEMU says x", True)),
        (GREETING + event("RESET", "true", "guest-reset"), ("QEMU crashed or was killed", False)),
        (GREETING + "[1]\nx\n" + '{"event": "SHUTDOWN"}\n', ("QEMU crashed or was killed", False)),
        ("", ("QEMU crashed or was killed", False)),
    ],
    ids=["guest", "host", "many", "reset", "strange", "none"],
)
def test_the_last_shutdown_counts(tmp_path: Path, events: str, expected: tuple[str, bool]) -> None:
    (tmp_path / shutdown.EVENTS).write_text(events)
    assert shutdown.reason(tmp_path) == expected


def test_a_machine_without_a_directory_was_removed_here(tmp_path: Path) -> None:
    assert shutdown.reason(tmp_path / "gone") == ("somebody on this host removed it", False)


@pytest.mark.skipif(not shutil.which("qemu-system-x86_64"), reason="QEMU is not installed")
def test_qemu_records_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutdown.prepare(tmp_path)
    machine = ["qemu-system-x86_64", "-nodefaults", "-display", "none", "-machine", "q35,accel=tcg", "-m", "32M"]
    argv = [*machine, "-qmp", "unix:qmp.sock,server=on,wait=off", *shutdown.ARGUMENTS]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL) as process:
        with qemu.wait_for_qmp(lambda: process.poll() is None, time.monotonic() + 60) as qmp:
            qmp.execute("quit")
        process.wait(60)
    assert shutdown.reason(tmp_path) == ("QEMU says host-qmp-quit", False)
