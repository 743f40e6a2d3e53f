from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from provisioner.base.errors import FAMILIES_PAGE, Section, TaskFamilyError, UsageError, explained
from provisioner.base.models import FileBuildStep, ShellBuildStep
from provisioner.family.build_steps import load_build_steps, parse_build_steps
from provisioner.family.loader import TaskFamily, load_family, refuse_env_file_inside
from provisioner.family.manifest import parse_manifest
from provisioner.family.setup_data import parse_setup_data, parse_vm_spec
from provisioner.images.layers import family_image_name

MODULE = "class TaskFamily:\n    def get_tasks(): return {}\n"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    root = tmp_path / "count_odds"
    (root / "assets").mkdir(parents=True)
    (root / "count_odds.py").write_text(MODULE)
    (root / "assets" / "data").write_text("1 2 3")
    return root


def test_a_family_has_its_directorys_name_and_all_its_files(directory: Path) -> None:
    (directory / "build_steps.json").write_text(
        json.dumps([{"type": "shell", "commands": ["ls"]}, {"type": "file", "source": "assets", "destination": "/a"}])
    )
    (directory / "manifest.yml").write_text("tasks: {main: {resources: {cpus: 2}}}")
    family = load_family(directory)
    assert (family.name, family.directory, family.module) == ("count_odds", directory, directory / "count_odds.py")
    assert family.files == ("assets/data", "build_steps.json", "count_odds.py", "manifest.yml")
    assert family.build_steps == (
        ShellBuildStep(type="shell", commands=("ls",)),
        FileBuildStep(type="file", source="assets", destination="/a"),
    )
    assert family.manifest.resources("main").cpus == 2


def test_a_family_is_loaded_by_a_relative_path_and_a_link(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    assert load_family(Path()).name == load_family(Path("assets/..")).name == "count_odds"
    (directory.parent / "other_name").symlink_to(directory)
    (directory / "other_name.py").write_text(MODULE)
    linked = load_family(directory.parent / "other_name")
    assert (linked.name, linked.directory) == ("other_name", directory)


def test_a_missing_family_beside_the_longest_names_is_told(tmp_path: Path) -> None:
    parent = tmp_path / ("a" * 255)
    parent.mkdir()
    with pytest.raises(TaskFamilyError, match="does not exist"):
        load_family(parent / "family")


def test_the_module_is_never_executed(directory: Path) -> None:
    (directory / "count_odds.py").write_text(f"open({str(directory / 'ran')!r}, 'w')\n{MODULE}")
    load_family(directory)
    assert not (directory / "ran").exists()


def test_caches_and_checkouts_are_left_out(directory: Path) -> None:
    left_out = [".git/config", ".venv/bin/python", "__pycache__/x.pyc", "assets/__pycache__/y.pyc", "assets/.DS_Store"]
    kept = [".env", "assets/challenge.pyc", "assets/.git/config", "assets/$(id)", "assets/${x}", "assets/{{ y }}"]
    for name in left_out + kept:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()
    assert load_family(directory).files == tuple(sorted([*kept, "assets/data", "count_odds.py"]))


def test_the_images_name_is_the_same_in_another_place(directory: Path) -> None:
    before = family_image_name(load_family(directory), "base", {})
    copy = directory.parent / "elsewhere" / "count_odds"
    shutil.copytree(directory, copy)
    (copy / "assets" / "data").chmod(0o600)
    (copy / "assets" / "data").touch()
    (copy / "__pycache__").mkdir()
    (copy / "__pycache__" / "x.pyc").touch()
    assert family_image_name(load_family(copy), "base", {}) == before


def test_an_env_file_among_the_familys_files_is_refused(directory: Path) -> None:
    (directory / ".env").write_text("KEY=secret")
    (directory.parent / ".env").write_text("KEY=secret")
    family: TaskFamily = load_family(directory)
    refuse_env_file_inside(family, directory.parent / ".env")
    with pytest.raises(TaskFamilyError, match="would be copied into the image"):
        refuse_env_file_inside(family, directory / ".env")


def family(directory: Path, text: str) -> Path:
    (directory / "fam").mkdir()
    (directory / "fam" / "fam.py").write_text(text)
    return directory / "fam"


def test_an_error_without_a_hint_gets_its_section() -> None:
    with pytest.raises(TaskFamilyError, match="wrong") as caught, explained("methods"), explained("vmspec"):
        raise TaskFamilyError("wrong")
    assert caught.value.hint == f"{FAMILIES_PAGE}#vmspec says what is allowed."


def test_a_hint_and_other_errors_stay_as_they_are() -> None:
    with pytest.raises(TaskFamilyError) as caught, explained("methods"):
        raise TaskFamilyError("wrong", hint="Do this.")
    assert caught.value.hint == "Do this."
    with pytest.raises(UsageError) as other, explained("methods"):
        raise UsageError("another")
    assert other.value.hint is None


def test_each_kind_of_file_and_value_has_its_section(tmp_path: Path) -> None:
    (tmp_path / "build_steps.json").write_text("1")
    machines = {"cpu_count_range": (1, 2), "ram_gib_range": (1, 2)}
    tries: list[tuple[Section, Callable[[], object]]] = [
        ("manifest", lambda: parse_manifest(b"tasks: 1")),
        ("vmspec", lambda: parse_vm_spec({}, "spec")),
        ("build-steps", lambda: parse_vm_spec({**machines, "build_steps": 1}, "spec")),
        ("build-steps", lambda: parse_build_steps(1, "steps")),
        ("build-steps", lambda: load_build_steps(tmp_path)),
        ("methods", lambda: parse_setup_data({"tasks": {}})),
        ("vmspec", lambda: parse_setup_data({"tasks": {"a": {"aux_vm_spec": 1}}})),
        ("files", lambda: load_family(tmp_path / "Big")),
        ("methods", lambda: load_family(family(tmp_path, "class TaskFamily: pass"))),
    ]
    (tmp_path / "Big").mkdir()
    for section, attempt in tries:
        with pytest.raises(TaskFamilyError) as caught:
            attempt()
        assert caught.value.hint == f"{FAMILIES_PAGE}#{section} says what is allowed."


def test_a_directory_that_is_not_there_needs_no_explanation(tmp_path: Path) -> None:
    with pytest.raises(TaskFamilyError, match="does not exist") as caught:
        load_family(tmp_path / "nothing")
    assert caught.value.hint is None
