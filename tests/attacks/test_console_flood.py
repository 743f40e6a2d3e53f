"""Root in a machine writes to ttyS0 without end, or makes QEMU and passt log without end.

The files on the controller stay bounded meanwhile, and to read them takes a bounded amount of memory. The
beginning (the boot) and the end are kept.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.base.config import Settings
from provisioner.clouds.local.cloud import LocalCloud
from provisioner.clouds.local.vm import machine_logs
from provisioner.store.home import Home
from tests.unit.fakes.world import environment
from tests.waiting import BOUND_SECONDS, until

ROOT = Path(__file__).parents[2]
# Holds the lock on the pidfile as QEMU does, and writes to the serial log without end, but for a log that nothing cuts.
FLOOD = """
import fcntl, os, time
os.mkdir("run")
pidfile = open("run/qemu.pid", "w")
fcntl.lockf(pidfile, fcntl.LOCK_EX)
log = os.open("run/serial.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(log, b"Linux version\\n")
print("up", flush=True)
while True:
    if os.fstat(log).st_size < 64 << 20:
        os.write(log, b"A" * 65536)
    time.sleep(0.01)
"""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Path]:
    """A machine's directory, in which a stand-in for QEMU floods the serial log."""
    directory = tmp_path / "home" / "environments" / "env" / "primary"
    directory.mkdir(parents=True)
    (directory / "expires_at").write_text(str(time.time() + 3600))
    with subprocess.Popen([sys.executable, "-c", FLOOD], cwd=directory, stdout=subprocess.PIPE) as flood:
        assert flood.stdout
        assert flood.stdout.readline() == b"up\n"
        try:
            yield directory
        finally:
            flood.kill()


def test_a_flooded_console_stays_bounded_on_disk(machine: Path) -> None:
    argv = [sys.executable, "-m", "provisioner.clouds.local.watchdog"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, cwd=machine, env=environment) as watchdog:
        try:
            sizes: list[int] = []

            def was_cut_again_and_again() -> bool:
                sizes.append((machine / "run/serial.log").stat().st_size)
                return sum(after < before for before, after in itertools.pairwise(sizes)) > 2

            until(was_cut_again_and_again, lambda: watchdog.poll() is None)
        finally:
            watchdog.kill()


def test_the_beginning_and_the_end_of_a_flooded_console_are_kept(tmp_path: Path) -> None:
    log = tmp_path / machine_logs.SERIAL
    log.parent.mkdir()
    with log.open("ab", buffering=0) as writer:
        writer.write(b"Linux version 6\n" + b"A" * (5 << 20) + b"the end")
        machine_logs.trim_all(tmp_path)
        writer.write(b" of it")
    kept = log.read_bytes()
    assert kept.startswith(b"Linux version 6\nAAAA")
    assert kept.endswith(b"AAAAthe end of it")
    assert machine_logs.CUT in kept
    assert len(kept) < machine_logs.LIMIT_BYTES


def test_a_log_of_a_writer_at_any_offset_takes_little_disk(tmp_path: Path) -> None:
    log = tmp_path / "qemu.log"
    with log.open("wb", buffering=0) as writer:
        for _ in range(5):
            writer.write(b"A" * (2 << 20) + b"the end")
            machine_logs.trim_all(tmp_path)
            assert log.read_bytes().endswith(b"the end")
        assert log.stat().st_blocks * 512 < machine_logs.LIMIT_BYTES


def test_a_console_of_many_gigabytes_is_read_in_little_memory(tmp_path: Path) -> None:
    cloud = LocalCloud(Home(tmp_path), Settings())
    directory = tmp_path / "environments" / "env" / "primary"
    (directory / "run").mkdir(parents=True)
    with (directory / machine_logs.SERIAL).open("wb") as log:
        log.truncate(64 << 30)
        log.seek(0, os.SEEK_END)
        log.write(b"the end")
    tracemalloc.start()
    try:
        console = cloud.console(environment(), "primary")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert console.endswith("the end")
    assert peak < 16 << 20


def test_a_link_in_place_of_a_log_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"x" * (2 << 20))
    (tmp_path / "qemu.log").symlink_to(victim)
    os.mkfifo(tmp_path / "network.log")
    trimming = threading.Thread(target=machine_logs.trim_all, args=[tmp_path], daemon=True)
    trimming.start()
    trimming.join(BOUND_SECONDS)
    assert not trimming.is_alive(), "a pipe in place of a log stopped the watchdog"
    assert victim.stat().st_size == 2 << 20
