"""Tests how the version of a kernel is read from its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.clouds.local import kernel_version


def kernel(path: Path, version: bytes, pointer: int = 0x3000) -> Path:
    header = bytearray(0x4000)
    header[0x202:0x206] = b"HdrS"
    header[0x20E:0x210] = pointer.to_bytes(2, "little")
    header[0x3200 : 0x3200 + len(version)] = version
    path.write_bytes(header)
    return path


def test_the_release_is_the_first_word(tmp_path: Path) -> None:
    path = kernel(tmp_path / "vmlinuz", b"6.1.0-56-cloud-amd64 (debian-kernel@lists.debian.org) #1 SMP")
    assert kernel_version.of(path) == "6.1.0-56-cloud-amd64"


def test_what_a_family_writes_there_is_bounded_and_printable(tmp_path: Path) -> None:
    shown = kernel_version.of(kernel(tmp_path / "vmlinuz", b"6\x1b[2J\xff" + b"x" * 5000))
    assert shown.isprintable()
    assert len(shown) <= kernel_version.CHARACTERS


@pytest.mark.parametrize("pointer", [0, 0xFFFF, 0x1000], ids=["none", "outside", "nothing"])
def test_a_kernel_without_a_version_has_none(tmp_path: Path, pointer: int) -> None:
    with pytest.raises(ValueError, match="says no version"):
        kernel_version.of(kernel(tmp_path / "vmlinuz", b"6.1", pointer))


def test_another_file_is_no_kernel(tmp_path: Path) -> None:
    (tmp_path / "vmlinuz").write_bytes(b"MZ")
    with pytest.raises(ValueError, match="is no x86 kernel"):
        kernel_version.of(tmp_path / "vmlinuz")
