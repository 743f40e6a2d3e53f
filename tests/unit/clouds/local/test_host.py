"""Tests what a host is told that it lacks. tests/unit/cli/test_commands.py shows how `doctor` says it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from provisioner.clouds.local import host
from tests.command_line import ROOT
from tests.waiting import BOUND_SECONDS, until


@pytest.mark.parametrize("present", [True, False])
def test_a_host_without_the_keys_of_debian_13_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, present: bool
) -> None:
    keys = tmp_path / "keys.gpg"
    if present:
        keys.touch()
    monkeypatch.setattr(host, "DEBIAN_13_KEYS", keys)
    notes = [note for note in host.notes(tmp_path / "kvm.json") if "install debian-archive-keyring" in note]
    assert len(notes) == (0 if present else 1)


QEMU = "QEMU emulator version 7.2.{} (Debian 1:7.2+dfsg-7)"
HOLES = {
    "old": (QEMU.format(8), "CVE-2023-6693 CVE-2024-3446 CVE-2026-48914"),
    "debian-12": (QEMU.format(22), "CVE-2026-48914"),
    "other": ("QEMU emulator version 10.0.3", ""),
    "new": ("QEMU emulator version 11.0.2", ""),
    "none": ("", ""),
}


@pytest.mark.parametrize(("qemu", "holes"), HOLES.values(), ids=HOLES)
def test_a_host_is_told_of_known_holes_in_what_machines_meet(qemu: str, holes: str) -> None:
    found = host.known_holes(qemu, "")
    assert [word for note in found for word in note.split() if word.startswith("CVE-")] == holes.split()


def test_a_hole_that_the_distribution_has_mended_is_none() -> None:
    assert host.known_holes(QEMU.format(22), "Closes: CVE-2026-48914") == []


def test_the_holes_of_qemu_are_among_the_notes(stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.write_text(f"#!/bin/sh\necho '{QEMU.format(22)}'\n")
    monkeypatch.setattr(host, "QEMU_CHANGELOG", tmp_path / "changelog.gz")
    notes = host.notes(tmp_path / "kvm.json")
    assert (
        "QEMU emulator version 7.2.22 has the hole CVE-2026-48914 in virtio-blk: install a newer one once there is one."
        in notes
    )


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A qemu-system-x86_64 first on PATH that writes its pid on the host and hangs, as QEMU does under a broken KVM."""
    program = tmp_path / "bin" / "qemu-system-x86_64"
    program.parent.mkdir()
    pid = f'cut -d" " -f4 /proc/self/stat > "{tmp_path}/new"'
    program.write_text(f'#!/bin/sh\n{pid}\nmv "{tmp_path}/new" "{tmp_path}/pid"\nexec sleep 1000\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


def test_the_processor_is_told_from_one_that_can_do_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CPU_INFO", tmp_path / "cpuinfo")
    said = []
    for name, flags in (("Fast", "fpu"), ("Fast", "fpu vme"), ("Slow", "fpu")):
        (tmp_path / "cpuinfo").write_text(
            f"processor\t: 0\nmodel name\t: {name}\nflags\t\t: {flags}\n\nprocessor\t: 1\n"
        )
        said.append(host.processor())
    assert len(set(said)) == 3
    assert said[0].startswith("Fast, ")


def lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended, perhaps while this read it
        return False


def test_a_trial_does_not_outlive_a_controller_that_was_killed(stand_in: Path, tmp_path: Path) -> None:
    program = "from pathlib import Path; from provisioner.clouds.local import host; host._boots(Path('/nowhere'))"
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as controller:
        try:
            until((tmp_path / "pid").exists, lambda: controller.poll() is None)
            pid = int((tmp_path / "pid").read_text())
            assert lives(pid)
        finally:
            controller.kill()
    until(lambda: not lives(pid))


def test_a_guest_that_never_gets_anywhere_means_no(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    communicate = subprocess.Popen.communicate

    def communicate_in_no_time(trial: subprocess.Popen[bytes], given: bytes | None, timeout: float) -> object:
        """Waits for the guest to begin, and then no longer."""
        assert timeout == host.TRIAL_SECONDS
        until((tmp_path / "pid").exists, lambda: trial.poll() is None)
        return communicate(trial, given, timeout=0)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate_in_no_time)
    assert not host._boots(Path("/nowhere"))
    until(lambda: not lives(int((tmp_path / "pid").read_text())))


def test_only_a_kernel_that_spoke_counts_as_booted(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "TRIAL_SECONDS", BOUND_SECONDS)
    stand_in.write_text("#!/bin/sh\nexit 0\n")
    assert not host._boots(Path("/nowhere"))
    stand_in.write_text("#!/bin/sh\necho '[    0.000000] Linux version 6.1.0'\n")
    assert host._boots(Path("/nowhere"))


def test_the_answer_is_kept_until_the_host_boots_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = tmp_path / "kvm.json"
    boot = host.BOOT_ID.read_text().strip()
    answer.write_text(json.dumps({"boot": boot, "works": True}))
    assert host.kvm_works(Path("/nowhere"), answer)
    monkeypatch.setattr(host, "_openable", lambda: False)
    for stale in (json.dumps({"boot": "another", "works": True}), "{", "[]", ""):
        answer.write_text(stale)
        assert not host.kvm_works(Path("/nowhere"), answer)
        assert json.loads(answer.read_text()) == {"boot": boot, "works": False}
