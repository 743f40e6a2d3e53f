"""Tests how much of the host's disk a snapshot may take. tests/local and tests/examples freeze real machines."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from provisioner.clouds.local.frozen import snapshots
from provisioner.clouds.local.frozen.snapshots import PAUSED_FILE, Subject, end_if_abandoned, held
from provisioner.clouds.local.vm import disk
from provisioner.clouds.local.vm.qemu import Launch
from provisioner.store.files import is_locked
from tests.unit.fakes.qmp import serving
from tests.waiting import BOUND_SECONDS

LAUNCH = Launch(cpus=1, memory_mib=16, kernel="k", initrd="i", kvm=False, link=(), internet_fd=None, user=None)
MIB = 1 << 20


def written(path: Path, mib: int) -> Path:
    subprocess.run(["qemu-io", "-c", f"write -P 7 0 {mib}M", str(path)], check=True, stdout=subprocess.DEVNULL)
    return path


def test_bytes_below_the_machines_layer_count_too(tmp_path: Path) -> None:
    image, lower = tmp_path / "image.raw", tmp_path / "lower.qcow2"
    with image.open("wb") as file:
        file.truncate(1 << 30)
    disk.create(lower, image)
    written(lower, 64)
    directory, target = tmp_path / "primary", tmp_path / "target"
    directory.mkdir()
    target.mkdir()
    own = directory / disk.OVERLAY
    disk.create(own, lower, 1)
    disk.note_below(directory, lower)
    needed = Subject(directory, image, LAUNCH, 1, target).needed_bytes

    disk.copy(own, target / "disk.qcow2")
    disk.put_over(target / "disk.qcow2", lower, image, 1)
    taken = (target / "disk.qcow2").stat().st_blocks * 512
    assert taken >= 64 * MIB
    assert needed >= taken + LAUNCH.memory_mib * MIB


def test_a_machine_over_its_image_needs_what_it_has_written(tmp_path: Path) -> None:
    image, directory = tmp_path / "image.raw", tmp_path / "primary"
    with image.open("wb") as file:
        file.truncate(1 << 30)
    directory.mkdir()
    own = directory / disk.OVERLAY
    disk.create(own, image, 1)
    disk.note_below(directory, image)
    written(own, 32)
    needed = Subject(directory, image, LAUNCH, 1, tmp_path).needed_bytes
    assert (32 + 16) * MIB <= needed <= (32 + 16 + 1) * MIB


HELLO = "qmp_capabilities"
RESUMES = ["migrate_cancel", "query-status", "cont"]


def stop_and_fail(directory: Path) -> None:
    with held(directory) as qmp:
        qmp.execute("stop")
        assert is_locked(directory / PAUSED_FILE)
        raise ZeroDivisionError


def test_a_paused_machine_resumes_whatever_happens(tmp_path: Path) -> None:
    with serving(tmp_path, {}) as commands:
        with pytest.raises(ZeroDivisionError):
            stop_and_fail(tmp_path)
        assert commands == [HELLO, "stop", *RESUMES]
    assert not (tmp_path / PAUSED_FILE).exists()


def test_a_machine_paused_by_a_live_process_is_left_alone(tmp_path: Path) -> None:
    with serving(tmp_path, {}), held(tmp_path):
        end_if_abandoned(tmp_path, BOUND_SECONDS)  # QEMU would have no answer: it serves one client
        assert (tmp_path / PAUSED_FILE).exists()


def test_an_abandoned_machine_is_resumed_once(tmp_path: Path) -> None:
    (tmp_path / PAUSED_FILE).touch()
    with serving(tmp_path, {}) as commands:
        end_if_abandoned(tmp_path, BOUND_SECONDS)
        end_if_abandoned(tmp_path, BOUND_SECONDS)
        assert commands == [HELLO, *RESUMES]


def test_a_machine_that_does_not_resume_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / PAUSED_FILE).touch()
    with pytest.raises(OSError, match="No such file"):
        end_if_abandoned(tmp_path, BOUND_SECONDS)
    assert (tmp_path / PAUSED_FILE).exists()


def test_a_qemu_that_never_stops_writing_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "GIVING_UP_SECONDS", 0.1)
    (tmp_path / PAUSED_FILE).touch()
    with serving(tmp_path, {"query-status": {"status": "finish-migrate"}}) as commands:
        end_if_abandoned(tmp_path, BOUND_SECONDS)
        assert commands[-1] == "cont"
