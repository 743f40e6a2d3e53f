"""Tests that captures are found, end when they are full, and never take more of the disk than their bound."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from provisioner.clouds.local.frozen import templates
from provisioner.clouds.local.network import captures
from provisioner.clouds.local.network.captures import Captures
from provisioner.clouds.local.vm import disk, qemu
from provisioner.clouds.local.vm.qemu import command
from provisioner.recording.packets import LIMIT_BYTES
from tests.unit.clouds.local.vm.test_qemu import LAUNCH
from tests.unit.fakes.qmp import serving
from tests.waiting import BOUND_SECONDS


def test_only_a_recorded_machine_is_captured(tmp_path: Path) -> None:
    launch = replace(LAUNCH, link=(("link.sock", "../aux/link.sock"),))
    assert not any("filter-dump" in word for word in command(launch))
    recorded = replace(launch, capture=True)
    assert any("filter-dump" in word for word in command(recorded))
    for name in ("disk", "kernel", "initrd"):
        (tmp_path / name).touch()
    names = {
        templates.key(tmp_path / "disk", replace(each, kernel=f"{tmp_path}/kernel", initrd=f"{tmp_path}/initrd"))
        for each in (launch, recorded)
    }
    assert len(names) == 1  # both resume from one template


@pytest.fixture
def captured(tmp_path: Path) -> Path:
    """A machine's directory, in which QEMU may write."""
    (tmp_path / qemu.RUN).mkdir()
    return tmp_path


def test_captures_are_found_by_their_cards(captured: Path) -> None:
    assert list(captures.existing(captured)) == []
    (captured / "run/internet.pcap").touch()
    assert list(captures.existing(captured)) == [("internet", captured / "run/internet.pcap")]


def test_a_full_capture_ends_and_its_file_is_cut_off(captured: Path) -> None:
    path = captured / "run/link.pcap"
    path.write_bytes(b"x" * LIMIT_BYTES)
    watched = Captures(captured, BOUND_SECONDS)
    assert watched.look()  # it has grown fast
    with path.open("ab") as file:
        file.write(b"y" * 100_000)
    with serving(captured, {}) as commands:
        watched.look()
    assert commands == ["qmp_capabilities", "object-del"]
    assert path.stat().st_size == LIMIT_BYTES
    assert not watched.look()


def test_a_capture_that_qemu_does_not_end_stays_bounded(captured: Path) -> None:
    path = captured / "run/link.pcap"
    watched = Captures(captured, 0.1)
    with path.open("wb", buffering=0) as file:
        for _ in range(5):
            for _ in range(24):
                file.write(b"x" * (1 << 20))  # on at its own offset, beyond what was cut off
            watched.look()
    assert path.stat().st_blocks * 512 < LIMIT_BYTES + (1 << 20)
    assert path.read_bytes()[:LIMIT_BYTES] == b"x" * LIMIT_BYTES


def test_captures_end_when_the_hosts_disk_is_nearly_full(captured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "nearly_full", lambda _: True)
    (captured / "run/link.pcap").write_bytes(b"some")
    with serving(captured, {}) as commands:
        Captures(captured, BOUND_SECONDS).look()
    assert commands == ["qmp_capabilities", "object-del"]
    assert (captured / "run/link.pcap").read_bytes() == b"some"


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_what_is_no_file_is_left_alone(captured: Path, kind: str) -> None:
    target = captured / "target"
    target.write_bytes(b"x" * (LIMIT_BYTES + 1))
    path = captured / "run/link.pcap"
    path.symlink_to(target) if kind == "link" else os.mkfifo(path)
    assert not Captures(captured, 0.1).look()
    assert target.stat().st_size == LIMIT_BYTES + 1


def test_a_monitor_that_lies_about_its_captures_costs_no_time() -> None:
    line = f"  - capture-link: type=filter-dump,file=run/link.pcap,{'a=aaaaaaaaaaaa' * 100}"
    begin = time.process_time()
    assert captures.is_own(line.partition(",a=")[0] + ",maxlen=2048,status=on")
    assert not captures.is_own(f"{line}!")
    assert time.process_time() - begin < 5
