"""Tests what base images are called and made of. tests/local builds them and boots machines from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from provisioner.base.models import BaseImage, Distribution
from provisioner.base.progress import Silence
from provisioner.clouds.local import images
from provisioner.store.home import Home
from provisioner.store.images import ImageStore

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
