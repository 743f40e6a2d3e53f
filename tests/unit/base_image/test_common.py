"""What base images have in common, and what of the distribution's files they lack."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

from provisioner.clouds.guest_files import BASE_IMAGE, GUEST, guest_programs
from tests.pages import lacked_by_base_images, matches
from tests.unit.base_image.tree import SSHD, make_tree


def test_a_base_image_keeps_what_the_distribution_has(tmp_path: Path) -> None:
    tree = make_tree(tmp_path)
    program = tree.root / "etc/update-motd.d/10-uname"
    program.chmod(0o755)
    before = tree.files
    tree.run("common.sh", BASE_IMAGE / "rootfs", GUEST)
    gone = before - tree.files
    assert gone == {"/etc/ssh/ssh_host_rsa_key", "/usr/lib/python3.11/EXTERNALLY-MANAGED"}
    assert [path for path in gone if not matches(path, lacked_by_base_images())] == []
    assert stat.S_IMODE(program.stat().st_mode) == 0o755


def test_a_login_shows_the_message_of_the_day_without_programs(tmp_path: Path) -> None:
    tree = make_tree(tmp_path)
    for _ in range(2):
        tree.run("common.sh", BASE_IMAGE / "rootfs", GUEST)
        assert tree.text("etc/pam.d/sshd") == f"# {SSHD}"


def test_a_base_image_has_the_programs_that_run_from_its_disk(tmp_path: Path) -> None:
    tree = make_tree(tmp_path)
    guest = shutil.copytree(GUEST, tmp_path / "guest")
    for directory in (guest, guest / "provisioner_guest"):
        (directory / "__pycache__").mkdir(exist_ok=True)
    tree.run("common.sh", BASE_IMAGE / "rootfs", guest)
    installed = tree.root / "usr/lib/provisioner/guest"
    files = (path for path in installed.rglob("*") if path.is_file())
    assert sorted(str(path.relative_to(installed)) for path in files) == guest_programs()
    assert not list(installed.rglob("__pycache__"))
