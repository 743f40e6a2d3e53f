"""Tests machines' disks: layers, what they count for, and which machine ends when the host's disk is nearly full."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from provisioner.clouds.local.vm import disk, qemu
from provisioner.clouds.local.vm.disk import (
    GIB,
    Overlay,
    ReplacedBelowError,
    Room,
    copy,
    create,
    is_first_to_go,
    note_below,
    noted_below,
    opened,
    overlays,
    put_over,
    room,
    share_bytes,
)

MIB = 1 << 20


@pytest.fixture
def image(tmp_path: Path) -> Path:
    image = tmp_path / "image.raw"
    image.write_bytes(b"i" * (4 * MIB))
    return image


def write(layer: Path, offset: int, letter: str) -> None:
    pattern = f"write -P {ord(letter)} {offset} {MIB}"
    subprocess.run(["qemu-io", "-c", pattern, str(layer)], check=True, stdout=subprocess.DEVNULL)


def contents(layer: Path) -> str:
    raw = layer.with_suffix(".read")
    subprocess.run(["qemu-img", "convert", "-O", "raw", str(layer), str(raw)], check=True)
    return "".join(chr(raw.read_bytes()[offset]) for offset in range(0, 4 * MIB, MIB))


def backing(layer: Path) -> str:
    said = subprocess.run(["qemu-img", "info", "--output=json", str(layer)], check=True, capture_output=True).stdout
    return str(json.loads(said)["backing-filename"])


def test_a_layer_has_what_was_written_and_the_rest_from_below(tmp_path: Path, image: Path) -> None:
    layer = tmp_path / "layer.qcow2"
    create(layer, image)
    write(layer, MIB, "a")
    assert contents(layer) == "iaii"
    with opened(layer) as descriptors:
        assert len(set(descriptors)) == 2
    create(layer, image)
    assert contents(layer) == "iiii"


def test_a_copy_over_the_image_alone_has_what_was_in_between(tmp_path: Path, image: Path) -> None:
    between, layer, copied = (tmp_path / f"{name}.qcow2" for name in ("between", "layer", "copied"))
    create(between, image)
    write(between, MIB, "b")
    write(between, 2 * MIB, "b")
    create(layer, between)
    write(layer, 2 * MIB, "l")
    copy(layer, copied)
    put_over(copied, between, image, 1)
    between.unlink()
    layer.unlink()
    assert contents(copied) == "ibli"
    assert backing(copied) == str(image)


def test_a_copy_may_take_as_long_as_its_size_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, run, limits = tmp_path / "layer", subprocess.run, []

    def noting(*arguments: Any, timeout: float, **options: Any) -> Any:
        limits.append(timeout)
        return run(*arguments, timeout=timeout, **options)

    monkeypatch.setattr(subprocess, "run", noting)
    monkeypatch.setattr(disk, "COPIED_BYTES_PER_SECOND", MIB / 100)
    with layer.open("wb") as file:
        file.write(b"l" * MIB)
        file.truncate(1 << 30)  # a hole needs no time
    copy(layer, tmp_path / "copied")
    [seconds] = limits
    assert 700 <= seconds < 1000


def test_a_layers_words_about_its_backing_disk_do_not_count(tmp_path: Path, image: Path) -> None:
    secret, layer = tmp_path / "secret.raw", tmp_path / "layer.qcow2"
    secret.write_bytes(b"s" * (4 * MIB))
    create(layer, image)
    write(layer, 0, "l")
    subprocess.run(["qemu-img", "rebase", "-u", "-b", str(secret), "-F", "raw", str(layer)], check=True)
    put_over(layer, image, image, 1)
    assert contents(layer) == "liii"


def make_anew(below: Path) -> None:
    """Replaces a disk by another of the same size, as a template is that another machine threw away."""
    other = below.with_name("other")
    other.write_bytes(b"o" * below.stat().st_size)
    other.replace(below)


@pytest.mark.parametrize("change", [Path.unlink, make_anew])
def test_a_replaced_backing_disk_is_noticed(tmp_path: Path, image: Path, change: Callable[[Path], None]) -> None:
    note_below(tmp_path, image)
    assert noted_below(tmp_path) == image
    change(image)
    with pytest.raises(ReplacedBelowError, match="since the machine started"):
        noted_below(tmp_path)


A, B = Path("a"), Path("b")


@pytest.mark.parametrize(
    ("used_a", "used_b", "free", "goes"),
    [(9, 3, 1, True), (3, 9, 1, False), (9, 9, 1, True), (9, 3, 2, False), (2, 1, 0, False), (2, 0, 1, False)],
    ids=["most", "less", "equal", "room", "share", "alone"],
)
def test_the_machine_furthest_beyond_its_share_goes_first(used_a: int, used_b: int, free: int, goes: bool) -> None:
    existing = [Overlay(A, used_a * GIB, 2 * GIB), Overlay(B, used_b * GIB, 2 * GIB)]
    assert is_first_to_go(A, existing, free * GIB) is goes


def test_a_machine_without_a_share_never_goes() -> None:
    assert not is_first_to_go(A, [Overlay(B, 9 * GIB, 2 * GIB)], 0)
    assert not is_first_to_go(A, [], 0)


def test_room_is_what_is_free_less_what_is_due_and_the_reserve() -> None:
    assert Room(10 * GIB, 3 * GIB).bytes == 5 * GIB
    assert Room(4 * GIB, 3 * GIB).bytes == 0
    assert (share_bytes(16, 8), share_bytes(16, 1)) == (2 * GIB, 16 * GIB)


def test_disks_are_listed_with_what_they_take(tmp_path: Path) -> None:
    for name, share in {"one": "5", "two": "nonsense"}.items():
        (tmp_path / name / "primary").mkdir(parents=True)
        (tmp_path / name / "primary" / disk.SHARE).write_text(share)
    assert overlays(tmp_path) == [Overlay(tmp_path / "one" / "primary", 0, 5)]
    (tmp_path / "one" / "primary" / disk.OVERLAY).write_bytes(b"x" * 8192)
    [overlay] = overlays(tmp_path)
    assert (overlay.due_bytes, overlay.excess_bytes > 0) == (0, True)


def test_a_home_that_does_not_exist_yet_has_the_room_of_its_disk(tmp_path: Path) -> None:
    # Other programs write to the disk meanwhile.
    free = room(tmp_path / "home" / "environments").free_bytes
    assert free == pytest.approx(room(tmp_path).free_bytes, rel=0.1)
    assert free > 0


def test_the_reason_comes_before_the_end_and_the_disk_after(tmp_path: Path) -> None:
    assert disk.eviction(tmp_path) == ""
    overlay = tmp_path / disk.OVERLAY
    overlay.write_bytes(b"x")
    seen = []

    def end(ends: bool) -> bool:
        seen.append((disk.eviction(tmp_path)[:12], overlay.exists()))
        return ends

    disk.evict(tmp_path, lambda: end(False))
    disk.evict(tmp_path, lambda: end(True))
    assert seen == [("it was ended", True)] * 2
    assert not overlay.exists()


@pytest.fixture
def modest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the only machine that runs. It is beyond its share, and a flooder that has ended far more."""
    monkeypatch.setattr(disk, "_free", lambda _: GIB)
    monkeypatch.setattr(qemu, "live_pid", lambda pidfile: 1 if "modest" in pidfile.parts else None)
    for name, used_bytes in (("modest", 8192), ("flooder", 80_000)):
        directory = tmp_path / name / "primary"
        directory.mkdir(parents=True)
        (directory / disk.SHARE).write_text("1")
        (directory / disk.OVERLAY).write_bytes(b"x" * used_bytes)
    return tmp_path / "modest" / "primary"


def test_no_machine_goes_while_anothers_disk_is_removed(modest: Path) -> None:
    seen = []

    def end() -> bool:
        seen.append(disk.must_go(modest))
        return True

    disk.evict(modest.parents[1] / "flooder" / "primary", end)
    assert seen == [False]
    assert disk.must_go(modest)  # the flooder's disk is gone, and that was not enough


def test_a_disk_that_is_never_removed_keeps_no_other_machine(modest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "LEAVING_SECONDS", 0.0)
    disk.evict(modest.parents[1] / "flooder" / "primary", lambda: False)
    assert disk.must_go(modest)


def test_a_disk_that_cannot_be_written_is_one_short_line(tmp_path: Path) -> None:
    lower = tmp_path / "lower.qcow2"
    lower.write_text("no disk")
    with pytest.raises(subprocess.SubprocessError, match=r"a disk could not be written: .*qcow2") as raised:
        disk.create(tmp_path / "layer.qcow2", lower)
    assert len(str(raised.value)) < 400
    assert "bwrap" not in str(raised.value)


def test_a_program_that_reads_a_disk_has_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could type into the operator's shell there (CVE-2017-5226)."""
    program = tmp_path / "qemu-img"
    program.write_text("#!/bin/sh\n[ -t 0 ] || [ -t 1 ] || [ -t 2 ] || true < /dev/tty || exit 0\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ours, theirs = os.openpty()
    try:
        for number, kept in ((1, os.dup(1)), (2, os.dup(2))):
            os.dup2(theirs, number)
            try:
                disk.create(tmp_path / "layer.qcow2", None, 1)
            finally:
                os.dup2(kept, number)
                os.close(kept)
    finally:
        os.close(ours)
        os.close(theirs)
