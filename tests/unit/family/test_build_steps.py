from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.base.errors import TaskFamilyError
from provisioner.family.build_steps import check_build_steps, load_build_steps, parse_build_steps


def test_a_family_without_build_steps_has_none(tmp_path: Path) -> None:
    assert load_build_steps(tmp_path) == ()


@pytest.mark.parametrize("source", ["file", "directory", "directory/../file", ".", "./file", "link", "$(id)"])
def test_a_source_inside_the_family_passes_in_any_spelling(tmp_path: Path, source: str) -> None:
    (tmp_path / "directory").mkdir()
    for name in ("file", "$(id)"):
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to("directory")
    step = {"type": "file", "source": source, "destination": "x"}
    check_build_steps(parse_build_steps([step], "steps"), tmp_path)


def test_a_source_through_a_link_to_a_sibling_is_refused(tmp_path: Path) -> None:
    family, evil = tmp_path / "family", tmp_path / "family_evil"
    family.mkdir()
    evil.mkdir()
    (evil / "secret").touch()
    (family / "door").symlink_to(evil)
    step = {"type": "file", "source": "door/secret", "destination": "x"}
    with pytest.raises(TaskFamilyError, match="'door/secret' leads out of the family directory"):
        check_build_steps(parse_build_steps([step], "steps"), family)


def test_a_source_that_is_neither_file_nor_directory_is_refused() -> None:
    step = {"type": "file", "source": "null", "destination": "x"}
    with pytest.raises(TaskFamilyError, match="is neither a file nor a directory"):
        check_build_steps(parse_build_steps([step], "steps"), Path("/dev"))
