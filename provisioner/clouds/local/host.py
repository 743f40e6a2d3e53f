"""Finds out what this host lacks to run machines, and what would make them faster."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from provisioner.base import child_environment
from provisioner.clouds.local.vm import kvm

# program -> Debian package
PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "mmdebstrap": "mmdebstrap",
    "passt": "passt",
    "mke2fs": "e2fsprogs",
    "unshare": "util-linux",
    "newuidmap": "uidmap",
    "ip": "iproute2",
    "ssh": "openssh-client",
}
# Debian 12 has it since 12.11 (debian-archive-keyring 2023.3+deb12u2, its changelog).
DEBIAN_13_KEYS = Path("/usr/share/keyrings/debian-archive-trixie-stable.gpg")
USER_NAMESPACES = ("unshare", "--map-root-user", "--map-auto", "--mount", "--net", "true")


def problems() -> list[tuple[str, str]]:
    """Lists what this host lacks, as (problem, remedy)."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = sorted({package for program, package in PROGRAMS.items() if not shutil.which(program, path=path)})
    problems = []
    if missing:
        problems.append((f"Missing packages: {' '.join(missing)}", f"sudo apt-get install {' '.join(missing)}"))
    if {"util-linux", "uidmap"} & set(missing):
        return problems
    if os.geteuid() == 0 and not _works("unshare", "--net", "true"):
        problems.append(
            ("Root cannot create network namespaces here: it lacks CAP_SYS_ADMIN.", "Run it outside of the container.")
        )
    if os.geteuid() != 0 and not _works(*USER_NAMESPACES):
        problems.append(
            (
                "This user cannot make user namespaces with subordinate ids.",
                'sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 "$USER"; '
                "sudo sysctl kernel.unprivileged_userns_clone=1",
            )
        )
    return problems


def notes(kvm_answer: Path) -> list[str]:
    """Lists what works, but could work better.

    Args:
        kvm_answer: file that keeps the result of this host's KVM trial.
    """
    found = []
    if not DEBIAN_13_KEYS.exists():
        found.append(
            "The keys of Debian 13's archive are missing, so the base image debian-13 cannot be built: "
            "sudo apt-get update; sudo apt-get install debian-archive-keyring"
        )
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        found.append("No usable /dev/kvm: machines are emulated, and several times slower. Are you in the kvm group?")
    elif kvm.known_answer(kvm_answer) is False:
        found.append("/dev/kvm is there, but no kernel boots under it: machines are emulated, several times slower.")
    return found


def _works(*argv: str) -> bool:
    done = subprocess.run(
        argv, capture_output=True, stdin=subprocess.DEVNULL, check=False, env=child_environment.for_program(os.environ)
    )
    return done.returncode == 0
