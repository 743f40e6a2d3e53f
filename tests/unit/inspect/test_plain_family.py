"""Tests that a machine's configuration becomes a family that our own checks accept."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from provisioner.errors import UsageError
from provisioner.images.layer_keys import family_image_name, files_of
from provisioner.inspect.configuration import Machine
from provisioner.inspect.plain_family import SOURCES, TASK, plain_family
from provisioner.models import ShellBuildStep


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
    data = tmp_path / "data"
    names = []
    for name, text, machine in (
        ("a", "1", Machine()),
        ("b", "1", Machine()),
        ("c", "2", Machine()),
        ("d", "1", Machine(run=("true",))),
        ("e", "1", Machine(storage_gb=40)),
    ):
        data.write_text(text)
        (tmp_path / name).mkdir()
        machine = machine.model_copy(update={"files": (("/srv/data", str(data)),)})
        names.append(family_image_name(plain_family(machine, "none", tmp_path / name), "base", {}))
    assert names[0] == names[1]
    assert len(set(names)) == 4


def test_the_machine_gets_only_what_is_configured(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("1")
    run = ("cat manifest.yaml sandbox.py build_steps.json sources",)
    machine = Machine(run=run, files=(("/srv/data", str(tmp_path / "data")),))
    family = plain_family(machine, "none", tmp_path / "a")
    assert family.files == ("sandbox.py",)  # our programs read the machine's setup from it
    assert [files_of(family, step) for step in family.build_steps] == [(), ("sources/0",), (), ()]


def test_the_families_python_is_removed_before_anything_is_installed(tmp_path: Path) -> None:
    usr_local = tmp_path / "usr" / "local"
    for name in ("bin/python3", "include/python3.11/Python.h", "lib/python3.11/os.py", "lib/python3.13/dist-packages/x",
                 "share/x"):  # fmt: skip
        (usr_local / name).parent.mkdir(parents=True, exist_ok=True)
        (usr_local / name).touch()
    family = plain_family(Machine(packages=("python3-flask",)), "none", tmp_path / "a")
    assert isinstance(family.build_steps[0], ShellBuildStep)
    _, remove, *install = family.build_steps[0].commands
    assert "python3-flask" in install[-1]
    subprocess.run(["bash", "-euc", remove.replace("/usr/local", str(usr_local))], check=True)
    assert sorted(str(path.relative_to(usr_local)) for path in usr_local.rglob("*") if path.is_file()) == [
        "lib/python3.13/dist-packages/x",
        "share/x",
    ]


def test_a_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    machine = Machine(files=(("/srv/x", str(tmp_path / "missing")),))
    with pytest.raises(UsageError, match="missing"):
        _written(tmp_path, "a", machine)
