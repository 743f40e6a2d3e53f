"""Errors about a family name the section of the documentation that says what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from provisioner.errors import TaskFamilyError, UsageError
from provisioner.family.build_steps import load_build_steps, parse_build_steps
from provisioner.family.explained import BUILD_STEPS, FILES, MANIFEST, METHODS, VMSPEC, explained
from provisioner.family.loader import load_family
from provisioner.family.manifest import parse_manifest
from provisioner.family.setup_data import parse_setup_data, parse_vm_spec


def family(directory: Path, text: str) -> Path:
    (directory / "fam").mkdir()
    (directory / "fam" / "fam.py").write_text(text)
    return directory / "fam"


def test_an_error_without_a_hint_gets_its_section() -> None:
    with pytest.raises(TaskFamilyError, match="wrong") as caught, explained(METHODS), explained(VMSPEC):
        raise TaskFamilyError("wrong")
    assert caught.value.hint == f"{VMSPEC} says what is allowed."


def test_a_hint_and_other_errors_stay_as_they_are() -> None:
    with pytest.raises(TaskFamilyError) as caught, explained(METHODS):
        raise TaskFamilyError("wrong", hint="Do this.")
    assert caught.value.hint == "Do this."
    with pytest.raises(UsageError) as other, explained(METHODS):
        raise UsageError("another")
    assert other.value.hint is None


def test_each_kind_of_file_and_value_has_its_section(tmp_path: Path) -> None:
    (tmp_path / "build_steps.json").write_text("1")
    machines = {"cpu_count_range": (1, 2), "ram_gib_range": (1, 2)}
    tries: list[tuple[str, Callable[[], object]]] = [
        (MANIFEST, lambda: parse_manifest(b"tasks: 1")),
        (VMSPEC, lambda: parse_vm_spec({}, "spec")),
        (BUILD_STEPS, lambda: parse_vm_spec({**machines, "build_steps": 1}, "spec")),
        (BUILD_STEPS, lambda: parse_build_steps(1, "steps")),
        (BUILD_STEPS, lambda: load_build_steps(tmp_path)),
        (METHODS, lambda: parse_setup_data({"tasks": {}})),
        (VMSPEC, lambda: parse_setup_data({"tasks": {"a": {"aux_vm_spec": 1}}})),
        (FILES, lambda: load_family(tmp_path / "Big")),
        (METHODS, lambda: load_family(family(tmp_path, "class TaskFamily: pass"))),
    ]
    (tmp_path / "Big").mkdir()
    for section, attempt in tries:
        with pytest.raises(TaskFamilyError) as caught:
            attempt()
        assert caught.value.hint == f"{section} says what is allowed."


def test_a_directory_that_is_not_there_needs_no_explanation(tmp_path: Path) -> None:
    with pytest.raises(TaskFamilyError, match="does not exist") as caught:
        load_family(tmp_path / "nothing")
    assert caught.value.hint is None
