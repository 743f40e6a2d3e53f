"""Tests machines' disks as files, with the real qemu-img."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from provisioner.clouds.local.vm import disk_layers
from provisioner.clouds.local.vm.disk_layers import (
    ReplacedBelowError,
    copy,
    create,
    note_below,
    noted_below,
    opened,
    put_over,
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
    monkeypatch.setattr(disk_layers, "COPIED_BYTES_PER_SECOND", MIB / 100)
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


def test_the_disk_below_is_known_again(tmp_path: Path, image: Path) -> None:
    note_below(tmp_path, image)
    assert noted_below(tmp_path) == image


def remove(below: Path) -> None:
    below.unlink()


def make_anew(below: Path) -> None:
    """Replaces a disk by another of the same size, as a template is that another machine threw away."""
    other = below.with_name("other")
    other.write_bytes(b"o" * below.stat().st_size)
    other.replace(below)


@pytest.mark.parametrize("change", [remove, make_anew])
def test_a_replaced_backing_disk_is_noticed(tmp_path: Path, image: Path, change: Callable[[Path], None]) -> None:
    note_below(tmp_path, image)
    change(image)
    with pytest.raises(ReplacedBelowError, match="since the machine started"):
        noted_below(tmp_path)
