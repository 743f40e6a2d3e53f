"""Attack: a holder of a builder's key, or another machine's traces, waits for them in the machines of its image.

cloud-init writes the builder's key into root's authorized_keys. An image must keep neither that key nor the builder's
host keys, user data, logs or random seed, and must keep all that the family itself made.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from provisioner.clouds.guest_files import SENT

BUILDER = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBuilderBuilderBuilderBuilderBuilderBuild"
FAMILY = "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABFamilyFamilyFamily player@task"
USER_DATA = "#cloud-config\n{}\n"
# Of a builder, with the traces of cloud-init, sshd, systemd and apt.
REMAINS = {
    "root/.ssh/authorized_keys": f"{BUILDER} controller\n",
    "home/agent/.ssh/authorized_keys": f'command="true",no-pty {BUILDER}\n',
    "etc/ssh/authorized_keys.d/agent": f"{BUILDER}\n",
    "etc/ssh/ssh_host_ed25519_key": "PRIVATE KEY",
    "etc/ssh/ssh_host_ed25519_key.pub": "public",
    "etc/cloud/cloud-init.disabled": "",
    "etc/systemd/system/provisioner-later-boots.service": "[Service]",
    "etc/systemd/system/multi-user.target.wants/provisioner-later-boots.service": "[Service]",
    "var/lib/cloud/instances/i-1/user-data.txt": USER_DATA,
    "var/lib/cloud/data/instance-id": "i-1",
    "var/lib/cloud/sem/config_ssh": "done",
    "var/lib/cloud/seed/nocloud-net/user-data": USER_DATA,
    "var/log/cloud-init.log": USER_DATA,
    "var/log/cloud-init-output.log": USER_DATA,
    "var/log/journal/0123/system.journal": USER_DATA,
    "var/log/auth.log": "Accepted publickey for root",
    "var/log/wtmp": "root",
    "var/lib/systemd/random-seed": "seed",
    "var/lib/provisioner/results": "result",
    "root/.bash_history": "ls",
}
KEPT = {
    "root/task/secret.txt": "made by the family",
    "home/player/.ssh/authorized_keys": f"{FAMILY}\n",
    "var/lib/cloud/scripts/per-boot/family.sh": "#!/bin/sh\n",
    "var/log/nginx/access.log": "",
    "etc/ssh/sshd_config": "",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "disk"
    for name, content in {**REMAINS, **KEPT, "etc/machine-id": "0123\n"}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (root / "var/lib/cloud/instance").symlink_to("instances/i-1")
    return root


def seal(tree: Path, key: str = BUILDER) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", SENT / "seal.sh", tree, key], capture_output=True, text=True, check=False)


def test_an_image_keeps_the_family_and_nothing_of_the_builder(tree: Path) -> None:
    done = seal(tree, f"{BUILDER} controller@builder")
    assert done.returncode == 0, done.stderr
    remaining = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file() or path.is_symlink()}
    assert remaining == {*KEPT, "etc/machine-id"}
    assert {name: (tree / name).read_text() for name in KEPT} == KEPT
    assert (tree / "etc/machine-id").read_bytes() == b""


def test_the_familys_key_stays_beside_which_the_builders_goes(tree: Path) -> None:
    keys = tree / "root/.ssh/authorized_keys"
    keys.write_text(f"{FAMILY}\n{BUILDER} controller\n# a note\n")
    assert seal(tree).returncode == 0
    assert keys.read_text() == f"{FAMILY}\n# a note\n"


def test_a_disk_is_not_sealed_without_knowing_the_key(tree: Path) -> None:
    assert seal(tree, "").returncode != 0


def test_sealing_twice_changes_nothing(tree: Path) -> None:
    assert [seal(tree).returncode for _ in range(2)] == [0, 0]
    assert (tree / "home/player/.ssh/authorized_keys").read_text() == f"{FAMILY}\n"
