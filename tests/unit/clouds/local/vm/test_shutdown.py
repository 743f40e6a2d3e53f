"""Why a local machine ended, as QEMU records it."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from provisioner.clouds.local.vm import qemu, shutdown
from tests.waiting import BOUND_SECONDS

CRASH = ("QEMU crashed or was killed", None)
GREETING = '{"QMP": {"version": {}}}\n{"return": {}}\n'


def event(name: str, guest: str, reason: str) -> str:
    return f'{{"event": "{name}", "data": {{"guest": {guest}, "reason": "{reason}"}}}}\n'


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (GREETING + event("SHUTDOWN", "true", "guest-shutdown"), ("QEMU says guest-shutdown", True)),
        (GREETING + event("SHUTDOWN", "false", "host-signal"), ("QEMU says host-signal", False)),
        (event("RESET", "true", "guest-reset") * 9999 + event("SHUTDOWN", "true", "x"), ("QEMU says x", True)),
        (GREETING + event("RESET", "true", "guest-reset"), CRASH),
        (GREETING + "[1]\nx\n" + '{"event": "SHUTDOWN"}\n', CRASH),
        ("[" * 60_000 + "\n", CRASH),
        (event("SHUTDOWN", "true", "x" * 9999), ("QEMU says " + "x" * shutdown.REASON_CHARACTERS, True)),
        ("", CRASH),
    ],
    ids=["guest", "host", "many", "reset", "strange", "deep", "long", "none"],
)
def test_the_last_shutdown_counts(events: str, expected: tuple[str, bool | None]) -> None:
    kills = 3 if expected == CRASH else 4  # which do not matter where QEMU has said why
    assert shutdown.explain(events.encode(), 3, kills, rebooted=False) == expected


SHORT = ("the host ran out of memory and killed a process", True)


@pytest.mark.parametrize(
    ("noted", "expected"),
    [
        ("oom_kill 3\n", SHORT),
        ("oom_kill 0\n", SHORT),
        ("oom_kill 4\n", CRASH),
        ("oom_kill 5\n", CRASH),
        ("pgfault 9\n", CRASH),
        ("oom_kill x\n", CRASH),
        (None, CRASH),
    ],
    ids=["grown", "first", "same", "less", "no-counter", "strange", "unreadable"],
)
def test_the_counter_is_noted_before_qemu_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: str | None, expected: tuple[str, bool | None]
) -> None:
    vmstat = tmp_path / "vmstat"
    monkeypatch.setattr(shutdown, "VMSTAT", vmstat)
    if noted is not None:
        vmstat.write_text(noted)
    shutdown.prepare(tmp_path)
    vmstat.write_text("pgfault 9\noom_kill 4\n")
    assert shutdown.reason(tmp_path) == expected


def test_a_lost_note_counts_as_a_crash(tmp_path: Path) -> None:
    shutdown.prepare(tmp_path)
    (tmp_path / shutdown.KILLS).unlink()
    assert shutdown.reason(tmp_path) == CRASH


@pytest.mark.parametrize(
    ("noted", "now", "expected"),
    [
        ("one", "two", ("the host was restarted", False)),
        ("one", "one", SHORT),
        ("", "two", SHORT),
        ("one", "", SHORT),
    ],
    ids=["restarted", "same", "no-note", "unreadable"],
)
def test_the_end_of_the_host_ends_its_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: str, now: str, expected: tuple[str, bool | None]
) -> None:
    vmstat, boot_id = tmp_path / "vmstat", tmp_path / "boot"
    monkeypatch.setattr(shutdown, "VMSTAT", vmstat)
    monkeypatch.setattr(shutdown, "BOOT_ID", boot_id)
    vmstat.write_text("oom_kill 3\n")
    boot_id.write_text(noted)
    shutdown.prepare(tmp_path)
    vmstat.write_text("oom_kill 4\n")  # a count from another boot compares with nothing
    boot_id.write_text(now)
    assert shutdown.reason(tmp_path) == expected


def test_a_machine_without_a_directory_was_removed_here(tmp_path: Path) -> None:
    assert shutdown.reason(tmp_path / "gone") == ("its files were removed on this host", False)


@pytest.mark.skipif(not shutil.which("qemu-system-x86_64"), reason="QEMU is not installed")
def test_qemu_records_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutdown.prepare(tmp_path)
    machine = ["qemu-system-x86_64", "-nodefaults", "-display", "none", "-machine", "q35,accel=tcg", "-m", "32M"]
    argv = [*machine, "-qmp", "unix:run/qmp.sock,server=on,wait=off", *shutdown.ARGUMENTS]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL) as process:
        with qemu.wait_for_qmp(lambda: process.poll() is None, time.monotonic() + BOUND_SECONDS) as qmp:
            qmp.execute("quit")
        process.wait(BOUND_SECONDS)
    assert shutdown.reason(tmp_path) == ("QEMU says host-qmp-quit", False)
