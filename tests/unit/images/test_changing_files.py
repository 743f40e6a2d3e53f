"""Tests that no image keeps files other than those that its name stands for, though they change while it is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from provisioner.errors import ImageBuildError
from provisioner.images import build
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import family
from tests.unit.images.test_layers import INPUTS, of_kind, steps


@pytest.fixture
def cloud(cloud: FakeCloud) -> FakeCloud:
    cloud.keeps_layers = True
    return cloud


@pytest.mark.parametrize(
    "second",
    [{"type": "file", "source": "data", "destination": "/data"}, {"type": "shell", "commands": ["cp data /"]}],
    ids=["file", "shell"],
)
def test_a_file_that_changes_during_a_copy_makes_no_layer(
    session: Session, cloud: FakeCloud, tmp_path: Path, second: dict[str, Any]
) -> None:
    given = [{"type": "shell", "commands": ["a"]}, second]
    fam = family(tmp_path, **{"build_steps.json": json.dumps(given), "data": "1"})
    data = tmp_path / "fam" / "data"
    cloud.guest_defaults = {"during": {"shell": lambda: data.write_text("2")}}
    with pytest.raises(ImageBuildError, match="changed while they were read"):
        build.family_image(session, fam)
    assert len(of_kind(session, "layer")) == 1
    cloud.guest_defaults = {}
    build.family_image(session, family(tmp_path, **{"build_steps.json": json.dumps(given), "data": "1"}))
    assert len(of_kind(session, "layer")) == 2


@pytest.mark.parametrize("manifest", ["tasks: {}\n", INPUTS], ids=["whole", "split"])
@pytest.mark.parametrize("change", ["another", "gone"])
def test_a_file_that_changes_before_install_makes_no_image(
    session: Session, cloud: FakeCloud, tmp_path: Path, manifest: str, change: str
) -> None:
    changed = {"manifest.yaml": manifest, "requirements.txt": "jq", **steps("a")}
    fam = family(tmp_path, **changed)
    path = tmp_path / "fam" / "requirements.txt"
    during = path.unlink if change == "gone" else lambda: path.write_text("curl")
    cloud.guest_defaults = {"during": {"shell": during}}
    with pytest.raises(ImageBuildError, match=r"changed while they were read|cannot be read"):
        build.family_image(session, fam)
    assert {image.kind for image in session.images.all()} == {"base", "layer"}
    cloud.guest_defaults = {}
    assert build.family_image(session, family(tmp_path, **changed))
