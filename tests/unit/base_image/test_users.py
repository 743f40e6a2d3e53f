"""The users of machines, and the agent's limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.base_image.tree import make_tree

RULE = "usr/share/pam-configs/provisioner"
PROGRAM = "usr/lib/provisioner/guest/agent_cgroup.sh"
ADD = "useradd --create-home --shell /bin/bash --uid"


@pytest.mark.parametrize(("distribution", "user"), [("debian", "admin"), ("ubuntu", "ubuntu")])
def test_an_aux_vm_has_its_distributions_own_user(tmp_path: Path, distribution: str, user: str) -> None:
    tree = make_tree(tmp_path, **{"etc/os-release": f'NAME="Linux"\nID={distribution}\nID_LIKE=debian\n'})
    assert tree.run("users.sh", "aux") == [f"{ADD} 1001 {user}"]
    assert tree.text(f"etc/sudoers.d/{user}") == f"{user} ALL=(ALL) NOPASSWD:ALL\n"


def test_a_vendors_user_stays_on_an_aux_vm_without_keys(tmp_path: Path) -> None:
    vendors = {
        "etc/os-release": "ID=ubuntu\n",
        "etc/passwd": "ubuntu:x:1000:1000:Ubuntu:/home/ubuntu:/bin/bash\n",
        "etc/sudoers.d/90-cloud-init-users": "ubuntu ALL=(ALL) NOPASSWD:ALL\n",
        "home/ubuntu/.bashrc": "export CUDA_HOME=/usr/local/cuda\n",
        "home/ubuntu/.ssh/authorized_keys": "ssh-rsa of somebody",
    }
    aux = make_tree(tmp_path / "aux", **vendors)
    assert aux.run("users.sh", "aux") == []
    assert aux.text("home/ubuntu/.bashrc") == vendors["home/ubuntu/.bashrc"]
    assert aux.text("etc/sudoers.d/ubuntu") == "ubuntu ALL=(ALL) NOPASSWD:ALL\n"
    assert not {"/home/ubuntu/.ssh/authorized_keys", "/etc/sudoers.d/90-cloud-init-users"} & aux.files
    primary = make_tree(tmp_path / "primary", **vendors)
    assert "userdel --force --remove ubuntu" in primary.run("users.sh", "primary")
    assert not {path for path in primary.files if path.startswith("/etc/sudoers.d/")} - {"/etc/sudoers.d/README"}


def test_the_agents_limits_are_the_primary_machines_alone(tmp_path: Path) -> None:
    aux = make_tree(tmp_path / "aux")
    assert not any("pam" in call for call in aux.run("users.sh", "aux"))
    assert not (aux.root / RULE).exists()
    assert not (aux.root / PROGRAM).exists()
    primary = make_tree(tmp_path / "primary")
    assert "pam-auth-update --package" in primary.run("users.sh", "primary")
    assert f"/{PROGRAM} login" in primary.text(RULE)
    assert (primary.root / PROGRAM).exists()
