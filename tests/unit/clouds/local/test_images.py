"""Tests what base images are called and made of. tests/local builds them and boots machines from them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from provisioner.base.errors import ImageBuildError, InfrastructureError
from provisioner.base.models import BaseImage, Distribution, MachineRecord
from provisioner.base.progress import Silence
from provisioner.clouds.local import images
from provisioner.clouds.local.frozen import snapshots
from provisioner.clouds.local.vm import disk
from provisioner.store.home import Home
from provisioner.store.images import ImageStore
from tests.unit.fakes.world import SIZE

TREE = Path("tree.tar")
NEWER = BaseImage(role="primary", distribution="debian-13")


def test_a_distributions_images_have_their_own_digest(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("certificate")
    digests = {images.digest(which, given) for which in images.SUITES for given in (None, bundle)}
    assert len(digests) == 4
    assert {images.digest(which, None) for which in images.SUITES} < digests


@pytest.mark.parametrize(("which", "suite"), [("debian-12", "bookworm"), ("debian-13", "trixie")])
def test_a_tree_comes_from_its_own_suites_archives_alone(which: Distribution, suite: str) -> None:
    argv = images._mmdebstrap(which, TREE, None)
    assert argv[argv.index("tree.tar") - 1] == suite
    archives = [part for part in argv if part.startswith("deb http")]
    assert [archive.split()[2] for archive in archives] == [suite, f"{suite}-updates", f"{suite}-security"]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Distribution]:
    """Replaces what is slow of a build by empty files, and returns the distributions that were built."""
    distributions: list[Distribution] = []

    def build(
        distribution: Distribution, directory: Path, ca_bundle: Path | None, on_output: Callable[[str], None]
    ) -> tuple[str, ...]:
        for name in (*images.BOOT_FILES, "build.log", *(f"{role}.raw" for role in images.ROLES[distribution])):
            (directory / name).write_text(f"{name} of {distribution}")
        distributions.append(distribution)
        return (f"base-files:amd64={distribution}",)

    monkeypatch.setattr(images, "build", build)
    return distributions


def test_both_debians_are_built_once_and_each_has_its_own_kernel(tmp_path: Path, built: list[Distribution]) -> None:
    home = Home(tmp_path / "home")
    home.make()
    store = ImageStore(home)
    kinds = [BaseImage(role="primary"), NEWER, BaseImage(role="aux")] * 2
    names = [images.base_image(store, kind, None, Silence()) for kind in kinds]
    assert built == ["debian-12", "debian-13"]
    assert [name.rpartition("-")[0] for name in names[:3]] == ["base-primary", "base-primary-debian-13", "base-aux"]
    assert names[:3] == names[3:]
    assert sorted(image.name for image in store.all()) == sorted(names[:3])
    for kind, name in zip(kinds, names, strict=True):
        assert (store.path(name) / "vmlinuz").read_text() == f"vmlinuz of {kind.distribution}"
        assert store.disk(name).read_text() == f"{kind.role}.raw of {kind.distribution}"
        assert store.load(name).packages == (f"base-files:amd64={kind.distribution}",)


FULL = subprocess.CalledProcessError(1, ["qemu-img"])


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MachineRecord:
    """A builder in tmp_path/machine whose disk is over that of the image `base`."""

    @contextlib.contextmanager
    def held(_: Path) -> Iterator[Mock]:
        yield Mock()

    monkeypatch.setattr(snapshots, "held", held)
    (tmp_path / "machine").mkdir()
    (tmp_path / "disk.raw").touch()
    (tmp_path / "machine" / disk.OVERLAY).write_text("disk")
    disk.note_below(tmp_path / "machine", tmp_path / "disk.raw")
    return MachineRecord(image="base", size=SIZE, user="root")


def copy(directory: Path, builder: MachineRecord) -> None:
    store = Mock(**{"disk.return_value": directory / "disk.raw"})
    images.copy(store, builder, directory / "machine", directory, 1 << 30)


@pytest.mark.parametrize("fails", ["copy", "put_over"])
def test_a_disk_that_becomes_full_is_no_fault_of_the_build(
    tmp_path: Path, builder: MachineRecord, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setattr(disk, "put_over", Mock())
    monkeypatch.setattr(disk, fails, Mock(side_effect=FULL))
    with pytest.raises(InfrastructureError, match="could not be copied"):
        copy(tmp_path, builder)


def test_a_disk_that_is_none_of_ours_ends_the_build(tmp_path: Path, builder: MachineRecord) -> None:
    with pytest.raises(ImageBuildError, match="is not used"):
        copy(tmp_path, builder)


def kernel(path: Path, version: bytes, pointer: int = 0x3000) -> Path:
    header = bytearray(0x4000)
    header[0x202:0x206] = b"HdrS"
    header[0x20E:0x210] = pointer.to_bytes(2, "little")
    header[0x3200 : 0x3200 + len(version)] = version
    path.write_bytes(header)
    return path


def test_the_release_is_the_first_word(tmp_path: Path) -> None:
    path = kernel(tmp_path / "vmlinuz", b"6.1.0-56-cloud-amd64 (debian-kernel@lists.debian.org) #1 SMP")
    assert images.kernel_version(path) == "6.1.0-56-cloud-amd64"


def test_what_a_family_writes_there_is_bounded_and_printable(tmp_path: Path) -> None:
    shown = images.kernel_version(kernel(tmp_path / "vmlinuz", b"6\x1b[2J\xff" + b"x" * 5000))
    assert shown.isprintable()
    assert len(shown) <= images.CHARACTERS


@pytest.mark.parametrize("pointer", [0, 0xFFFF, 0x1000], ids=["none", "outside", "nothing"])
def test_a_kernel_without_a_version_has_none(tmp_path: Path, pointer: int) -> None:
    with pytest.raises(ValueError, match="says no version"):
        images.kernel_version(kernel(tmp_path / "vmlinuz", b"6.1", pointer))


def test_another_file_is_no_kernel(tmp_path: Path) -> None:
    (tmp_path / "vmlinuz").write_bytes(b"MZ")
    with pytest.raises(ValueError, match="is no x86 kernel"):
        images.kernel_version(tmp_path / "vmlinuz")
