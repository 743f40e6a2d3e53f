"""Errors about a family name the section of the documentation that says what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from provisioner.errors import FAMILIES_PAGE, Section, TaskFamilyError, UsageError, explained
from provisioner.family.build_steps import load_build_steps, parse_build_steps
from provisioner.family.loader import load_family
from provisioner.family.manifest import parse_manifest
from provisioner.family.setup_data import parse_setup_data, parse_vm_spec


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
