"""Tests that the files that go into machines are found where they lie."""

from __future__ import annotations

import pytest

from provisioner.clouds.guest_files import BASE_IMAGE, GUEST, packages


def test_the_recipes_and_the_guests_programs_are_there() -> None:
    assert (BASE_IMAGE / "customize.sh").is_file()
    assert (BASE_IMAGE / "disks.sh").is_file()
    assert (BASE_IMAGE / "local" / "etc" / "initramfs-tools").is_dir()
    assert (GUEST / "helper.py").is_file()


@pytest.mark.parametrize("name", ["packages.txt", "packages-local.txt"])
def test_a_list_of_packages_is_names_only(name: str) -> None:
    names = packages(name)
    assert names
    assert not [line for line in names if "#" in line or line != line.strip()]
