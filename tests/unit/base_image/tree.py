"""A directory tree on which scripts of base_image/ work, with a `chroot` that writes down what it is asked for."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from provisioner.clouds.guest_files import BASE_IMAGE
from tests.waiting import BOUND_SECONDS

# Instead of a new user's entries there is only the home.
CHROOT = """#!/bin/sh
tree=$1
shift
echo "$*" >> "${0%/*}/calls"
case $1 in useradd) for user; do :; done; mkdir -p "$tree/home/$user" ;; esac
"""
# Debian's PAM configuration of sshd, as far as it is about the message of the day.
SSHD = """session    optional     pam_motd.so  motd=/run/motd.dynamic
session    optional     pam_motd.so noupdate
"""
FILES = {
    "etc/os-release": "ID=debian\n",
    "etc/pam.d/sshd": SSHD,
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\n",
    "etc/ssh/ssh_host_rsa_key": "a key\n",
    "etc/ssh/sshd_config.d/vendor.conf": "",
    "etc/sudoers.d/README": "",
    "etc/update-motd.d/10-uname": "#!/bin/sh\nuname -snrvm\n",
    "root/.profile": "",
    "usr/lib/python3.11/EXTERNALLY-MANAGED": "",
    "usr/lib/provisioner/guest/agent_cgroup.sh": "",
    "usr/sbin/sshd": "",
}


@dataclass(frozen=True)
class Tree:
    """A tree, and the programs that scripts find first.

    Args:
        programs: their directory, outside of the tree.
    """

    root: Path
    programs: Path

    def run(self, script: str, *arguments: Path | str) -> list[str]:
        """Runs a script on the tree, and returns what it did in it by chroot."""
        calls = self.programs / "calls"
        calls.write_text("")
        subprocess.run(
            ["sh", BASE_IMAGE / script, self.root, *arguments], check=True, timeout=BOUND_SECONDS,
            stdin=subprocess.DEVNULL, env={"PATH": f"{self.programs}:{os.environ['PATH']}"},
        )  # fmt: skip
        return calls.read_text().splitlines()

    def text(self, file: str) -> str:
        """Returns the contents of a file of the tree."""
        return (self.root / file).read_text()

    @property
    def files(self) -> set[str]:
        """The files and directories of the tree, as absolute paths in it."""
        return {f"/{path.relative_to(self.root)}" for path in self.root.rglob("*")}


def make_tree(directory: Path, **changes: str) -> Tree:
    """Returns a tree with files as a distribution has them.

    Args:
        changes: the contents of more files, or of other ones.
    """
    tree = Tree(directory / "tree", directory / "programs")
    for file, text in {**FILES, **changes}.items():
        path = tree.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    tree.programs.mkdir()
    (tree.programs / "chroot").write_text(CHROOT)
    (tree.programs / "chroot").chmod(0o755)
    return tree
