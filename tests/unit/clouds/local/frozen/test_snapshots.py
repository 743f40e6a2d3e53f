"""Tests how much of the host's disk a snapshot may take. tests/local and tests/examples freeze real machines."""

from __future__ import annotations

import subprocess
from pathlib import Path

from provisioner.clouds.local.frozen.snapshots import Subject
from provisioner.clouds.local.vm import disk, disk_layers
from provisioner.clouds.local.vm.qemu import Launch

LAUNCH = Launch(cpus=1, memory_mib=16, kernel="k", initrd="i", kvm=False, link=(), internet_fd=None, user=None)
MIB = 1 << 20


def written(path: Path, mib: int) -> Path:
    subprocess.run(["qemu-io", "-c", f"write -P 7 0 {mib}M", str(path)], check=True, stdout=subprocess.DEVNULL)
    return path


def test_bytes_below_the_machines_layer_count_too(tmp_path: Path) -> None:
    image, lower = tmp_path / "image.raw", tmp_path / "lower.qcow2"
    with image.open("wb") as file:
        file.truncate(1 << 30)
    disk_layers.create(lower, image)
    written(lower, 64)
    directory, target = tmp_path / "primary", tmp_path / "target"
    directory.mkdir()
    target.mkdir()
    own = directory / disk.OVERLAY
    disk_layers.create(own, lower, 1)
    disk_layers.note_below(directory, lower)
    needed = Subject(directory, image, LAUNCH, 1, target).needed_bytes

    disk_layers.copy(own, target / "disk.qcow2")
    disk_layers.put_over(target / "disk.qcow2", lower, image, 1)
    taken = (target / "disk.qcow2").stat().st_blocks * 512
    assert taken >= 64 * MIB
    assert needed >= taken + LAUNCH.memory_mib * MIB


def test_a_machine_over_its_image_needs_what_it_has_written(tmp_path: Path) -> None:
    image, directory = tmp_path / "image.raw", tmp_path / "primary"
    with image.open("wb") as file:
        file.truncate(1 << 30)
    directory.mkdir()
    own = directory / disk.OVERLAY
    disk_layers.create(own, image, 1)
    disk_layers.note_below(directory, image)
    written(own, 32)
    needed = Subject(directory, image, LAUNCH, 1, tmp_path).needed_bytes
    assert (32 + 16) * MIB <= needed <= (32 + 16 + 1) * MIB
