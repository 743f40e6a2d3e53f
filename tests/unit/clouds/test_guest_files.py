"""Tests that the files that go into machines are found where they lie."""

from __future__ import annotations

import pytest

from provisioner.clouds.guest_files import BASE_IMAGE, GUEST, guest_programs, packages


def test_the_recipes_and_the_guests_programs_are_there() -> None:
    assert (BASE_IMAGE / "customize.sh").is_file()
    assert (BASE_IMAGE / "disks.sh").is_file()
    assert (BASE_IMAGE / "local" / "etc" / "initramfs-tools").is_dir()
    assert (GUEST / "helper.py").is_file()


def test_the_exec_server_runs_in_the_images_interpreter() -> None:
    script = (BASE_IMAGE / "runtime.sh").read_text()
    assert "\nhome=/usr/lib/provisioner\n" in script
    assert 'chmod 0755 "$tree$home/python3"' in script
    unit = (BASE_IMAGE / "rootfs/etc/systemd/system/provisioner-exec.service").read_text()
    assert "\nExecStart=/usr/lib/provisioner/python3 -I -S /usr/lib/provisioner/guest/exec_server.py " in unit


@pytest.mark.parametrize("name", ["packages.txt", "packages-local.txt", "python/packages.txt"])
def test_a_list_of_packages_is_names_only(name: str) -> None:
    names = packages(name)
    assert names
    assert not [line for line in names if "#" in line or line != line.strip()]


def test_images_contain_only_what_runs_from_their_disk() -> None:
    programs = guest_programs()
    assert {"helper.py", "agent.py", "ttl.sh", "metr_task_standard/__init__.py"} <= set(programs)
    assert "provisioner_guest/exec/call.py" in programs
    assert not [name for name in programs if name.startswith("sent/")]
    assert not [name for name in programs if "__pycache__" in name]
