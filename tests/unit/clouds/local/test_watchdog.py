"""The end of a machine whose directory was removed while it ran, and the resumption of one that QEMU paused."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from provisioner.clouds.local import watchdog
from provisioner.clouds.local.frozen import snapshots
from provisioner.clouds.local.vm import disk, qemu
from tests.command_line import ROOT
from tests.unit.fakes.qmp import serving
from tests.waiting import BOUND_SECONDS

# Holds the lock on the pidfile as QEMU does, and tells when the watchdog has asked for the machine's port.
QEMU = """
import fcntl, os, signal, socket
os.mkdir("run")
port = socket.socket(socket.AF_UNIX)
port.bind("run/credentials.sock")
port.listen()
pidfile = open("run/qemu.pid", "w")
fcntl.lockf(pidfile, fcntl.LOCK_EX)
connection = port.accept()
print("watched", flush=True)
signal.pause()
"""


def test_a_machine_whose_directory_is_removed_ends(tmp_path: Path) -> None:
    directory = tmp_path / "primary"
    directory.mkdir()
    (directory / watchdog.EXPIRY).write_text(str(time.time() + 3600))
    bystander = subprocess.Popen(["sleep", "1000"], cwd=directory)
    machine = subprocess.Popen([sys.executable, "-c", QEMU], cwd=directory, stdout=subprocess.PIPE)
    watching = subprocess.Popen(
        [sys.executable, "-m", watchdog.__name__], cwd=directory, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        assert machine.stdout
        assert machine.stdout.readline() == b"watched\n"
        (directory / "run/qemu.pid").unlink()
        shutil.rmtree(directory)
        assert watching.wait(BOUND_SECONDS) == 0
        assert machine.wait(BOUND_SECONDS) == -signal.SIGKILL
        assert bystander.poll() is None
    finally:
        if machine.stdout:
            machine.stdout.close()
        for process in (watching, machine, bystander):
            process.kill()
            process.wait()


def test_a_machine_whose_directory_is_removed_during_a_look_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "primary"
    directory.mkdir()
    (directory / watchdog.EXPIRY).write_text(str(time.time() + 3600))
    monkeypatch.chdir(directory)
    machine = subprocess.Popen(["sleep", "1000"])
    # Only the first look finds QEMU, by two questions. In the second, the directory goes once the expiry has been read.
    pids = iter([machine.pid, machine.pid])
    monkeypatch.setattr(qemu, "live_pid", lambda _: next(pids, None))
    read, looks = watchdog._seconds_left, itertools.count(1)

    def seconds_left() -> float | None:
        left = read()
        if next(looks) == 2:
            shutil.rmtree(directory)
        return left

    monkeypatch.setattr(watchdog, "_seconds_left", seconds_left)
    try:
        assert watchdog.main() == 0
        assert machine.wait(BOUND_SECONDS) == -signal.SIGKILL
    finally:
        machine.kill()
        machine.wait()


def test_a_machine_paused_by_a_full_disk_resumes_even_if_the_look_for_a_dead_freezer_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(snapshots, "end_if_abandoned", fail)
    monkeypatch.setattr(disk, "nearly_full", lambda _: False)
    with serving(tmp_path, {"query-status": {"status": qemu.FULL_DISK}}) as commands:
        watchdog._resume(tmp_path, after_full_disk=True)
        assert commands == ["qmp_capabilities", "query-status", "cont"]
