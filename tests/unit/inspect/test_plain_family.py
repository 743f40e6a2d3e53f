"""Tests that a machine's configuration becomes a family that our own checks accept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from provisioner.errors import UsageError
from provisioner.family.loader import family_digest
from provisioner.inspect.configuration import Machine
from provisioner.inspect.plain_family import SOURCES, TASK, plain_family


def _written(tmp_path: Path, name: str, machine: Machine) -> Path:
    (tmp_path / name).mkdir()
    return plain_family(machine, "none", tmp_path / name).directory


def test_all_that_is_configured_is_in_the_family(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one").write_text("1")
    machine = Machine(
        user="dev", packages=("nmap", "git=1:2"), run=("make it so",), memory_gb=2, storage_gb=9,
        files=(("/srv/data", str(tmp_path / "data")),), services=(("web", "echo $HOME 100% 'now'"),),
    )  # fmt: skip
    (tmp_path / "a").mkdir()
    family = plain_family(machine, "full", tmp_path / "a")
    assert family.manifest.resources(TASK).memory_gb == 2
    assert family.manifest.resources(TASK).storage_gb == 9
    assert "full_internet" in family.module.read_text()
    steps = json.loads((family.directory / "build_steps.json").read_text())
    text = json.dumps(steps)
    for part in (
        "nmap git=1:2",
        "/srv/data",
        "useradd --create-home --shell /bin/bash dev",
        "make it so",
        "web.service",
    ):
        assert part in text
    assert (family.directory / SOURCES / "0" / "one").read_text() == "1"
    unit = (family.directory / SOURCES / "web.service").read_text()
    assert r"""ExecStart=/bin/sh -c "echo $$HOME 100%% 'now'" """.strip() in unit


def test_equal_configurations_share_one_image(tmp_path: Path) -> None:
    plain, other = Machine(), Machine(run=("true",))
    families = []
    for name, machine in (("a", plain), ("b", plain), ("c", other)):
        (tmp_path / name).mkdir()
        families.append(plain_family(machine, "none", tmp_path / name))
    digests = [family_digest(family) for family in families]
    assert digests[0] == digests[1] != digests[2]


def test_a_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    machine = Machine(files=(("/srv/x", str(tmp_path / "missing")),))
    with pytest.raises(UsageError, match="missing"):
        _written(tmp_path, "a", machine)
