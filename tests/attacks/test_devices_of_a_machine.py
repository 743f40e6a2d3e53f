"""Root in a machine looks for devices whose emulation has holes. The real QEMU says which there are."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.clouds.local.vm import confinement, disk, qemu, shutdown
from tests.waiting import BOUND_SECONDS

MOST_FUNCTIONS = 6  # host bridge, ISA bridge, disk, random numbers, serial ports, management card
NEEDLESS = ("kvmvapic", "ahci", "ICH9-SMB", "i8042", "vmport", "vmmouse", "VGA", "usb", "floppy", "parallel")


@pytest.fixture
def monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[qemu.QMP]:
    """The monitor of a machine that is alone and offline, and stands still."""
    monkeypatch.chdir(tmp_path)
    shutdown.prepare(tmp_path)
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", disk.OVERLAY, "1M"], check=True)
    with disk.opened(Path(disk.OVERLAY)) as opened, confinement.place_for_card() as card:
        launch = qemu.Launch(1, 32, "", "", False, (), None, None, opened, management_fd=card.fileno())
        argv = [*qemu.command(launch), "-S"]
        for option in ("-kernel", "-initrd", "-append"):
            del argv[argv.index(option) : argv.index(option) + 2]
        confined = (sys.executable, "-m", confinement.__name__, str(card.fileno()))
        process = subprocess.Popen([*confined, *argv], pass_fds=(card.fileno(), *opened))
    try:
        with qemu.wait_for_qmp(lambda: process.poll() is None, time.monotonic() + BOUND_SECONDS) as qmp:
            yield qmp
    finally:
        process.kill()
        process.wait()


def test_a_machine_has_few_devices(monitor: qemu.QMP) -> None:
    assert monitor.monitor("info pci").count("function") <= MOST_FUNCTIONS
    devices = monitor.monitor("info qtree")
    assert "virtio-blk-pci" in devices
    assert [each for each in NEEDLESS if each.lower() in devices.lower()] == []


def test_a_machine_has_no_system_management_mode(monitor: qemu.QMP) -> None:
    assert monitor.execute("qom-get", path="/machine", property="smm") == "off"
