"""Tests what comes of a builder's disk that cannot be copied as a layer."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from provisioner.base.errors import ImageBuildError, InfrastructureError
from provisioner.base.models import MachineRecord
from provisioner.clouds.local import capture
from provisioner.clouds.local.frozen import snapshots
from provisioner.clouds.local.vm import disk, disk_layers
from tests.unit.fakes.world import SIZE

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
    disk_layers.note_below(tmp_path / "machine", tmp_path / "disk.raw")
    return MachineRecord(image="base", size=SIZE, user="root")


def copy(directory: Path, builder: MachineRecord) -> None:
    store = Mock(**{"disk.return_value": directory / "disk.raw"})
    capture.copy(store, builder, directory / "machine", directory, 1 << 30)


@pytest.mark.parametrize("fails", ["copy", "put_over"])
def test_a_disk_that_becomes_full_is_no_fault_of_the_build(
    tmp_path: Path, builder: MachineRecord, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setattr(disk_layers, "put_over", Mock())
    monkeypatch.setattr(disk_layers, fails, Mock(side_effect=FULL))
    with pytest.raises(InfrastructureError, match="could not be copied"):
        copy(tmp_path, builder)


def test_a_disk_that_is_none_of_ours_ends_the_build(tmp_path: Path, builder: MachineRecord) -> None:
    with pytest.raises(ImageBuildError, match="is not used"):
        copy(tmp_path, builder)
