"""Finds out what this host lacks to run machines, whether its KVM works, by using it, and which holes are known."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from provisioner.base import child_environment
from provisioner.clouds.local.vm import bubblewrap, confinement
from provisioner.clouds.local.vm.processes import own_user
from provisioner.clouds.local.vm.qemu import confined
from provisioner.store.files import write_atomically

# program -> Debian package
PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "mmdebstrap": "mmdebstrap",
    "passt": "passt",
    "bwrap": "bubblewrap",
    "mke2fs": "e2fsprogs",
    "unshare": "util-linux",
    "newuidmap": "uidmap",
    "ip": "iproute2",
    "ssh": "openssh-client",
}
# Debian 12 has it since 12.11 (debian-archive-keyring 2023.3+deb12u2, its changelog).
DEBIAN_13_KEYS = Path("/usr/share/keyrings/debian-archive-trixie-stable.gpg")
QEMU_CHANGELOG = Path("/usr/share/doc/qemu-system-x86/changelog.Debian.gz")
USER_NAMESPACES = ("unshare", "--map-root-user", "--map-auto", "--mount", "--net", "true")


# QEMU's manual, "Security", of virtualization and other use cases.
_EMULATED = "machines are emulated, several times slower, and QEMU promises no isolation."


def problems() -> list[tuple[str, str]]:
    """Lists what this host lacks, as (problem, remedy)."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = sorted({package for program, package in PROGRAMS.items() if not shutil.which(program, path=path)})
    found = []
    if missing:
        found.append((f"Missing packages: {' '.join(missing)}", f"sudo apt-get install {' '.join(missing)}"))
    if {"util-linux", "uidmap"} & set(missing):
        return found
    if os.geteuid() == 0 and not _works("unshare", "--net", "true"):
        found.append(
            ("Root cannot create network namespaces here: it lacks CAP_SYS_ADMIN.", "Run it outside the container.")
        )
    if os.geteuid() != 0 and not _works(*USER_NAMESPACES):
        found.append(
            (
                "This user cannot make user namespaces with subordinate ids.",
                'sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 "$USER"; '
                "sudo sysctl kernel.unprivileged_userns_clone=1",
            )
        )
    if not found and not _makes_card():
        remedy = "sudo modprobe tun; sudo chmod 666 /dev/net/tun; to a container, pass it on: --device /dev/net/tun."
        found.append(("No usable /dev/net/tun, through which machines are reached.", remedy))
    if not found and (why := bubblewrap.problem()):
        problem = f"QEMU and what else a machine may take over cannot be kept from this host's files: {why}"
        found.append((problem, "Run it outside the container, or in one that is --privileged."))
    return found


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
        what = "This user may not open" if Path("/dev/kvm").exists() else "There is no"
        found.append(f"{what} /dev/kvm: {_EMULATED} docs/how-to/local.md says how to use KVM.")
    elif known_answer(kvm_answer) is False:
        found.append(f"/dev/kvm is there, but no kernel boots under it: {_EMULATED}")
    return [*found, *_own_holes()]


def installed(program: str) -> str:
    """Returns the version of a program's Debian package, or else what it says itself; empty if neither is there."""
    package = PROGRAMS[program]
    return _first_line("dpkg-query", "--show", "--showformat=${Version}", package) or _first_line(program, "--version")


def qemu_version() -> str:
    """Returns the first line of what QEMU says of its version; empty if there is none."""
    return _first_line("qemu-system-x86_64", "--version")


def _first_line(*argv: str) -> str:
    """Returns the first line of what a program prints; empty if it fails, or is not there."""
    with contextlib.suppress(OSError):
        done = subprocess.run(
            argv, capture_output=True, stdin=subprocess.DEVNULL, check=False,
            env=child_environment.for_program(os.environ),
        )  # fmt: skip
        if done.returncode == 0:
            return done.stdout.decode(errors="replace").partition("\n")[0].strip()
    return ""


# Holes through which a machine may leave, in what it meets here, with the first release of each branch that is not
# certainly open. Other branches are not judged: distributions mend them without another number.
# CVE records (cve.org), as of November 2026; for QEMU 7.2 also Debian's changelog of qemu.
_HOLES: dict[str, tuple[str, dict[tuple[int, int], int]]] = {
    "CVE-2023-6693": ("virtio-net", {(7, 2): 9}),
    "CVE-2024-3446": ("virtio-serial", {(7, 2): 11}),
    "CVE-2026-48914": ("virtio-blk", {(7, 2): 23, (11, 0): 2}),
}


def known_holes(qemu: str, changelog: str) -> list[str]:
    """Lists known holes through which a machine may leave this host's QEMU, a line for each. Pure.

    Args:
        qemu: the first line of `qemu-system-x86_64 --version`.
        changelog: of its package: Debian and Ubuntu name there what they have mended.
    """
    version = re.search(r"(\d+)\.(\d+)\.(\d+)", qemu)
    branch, release = ((int(version[1]), int(version[2])), int(version[3])) if version else ((0, 0), 0)
    return [
        f"{qemu.partition(' (')[0]} has the hole {cve} in {where}: install a newer one once there is one."
        for cve, (where, branches) in _HOLES.items()
        if cve not in changelog and release < branches.get(branch, 0)
    ]


def _own_holes() -> list[str]:
    """Returns the known holes of this host."""
    changelog = ""
    with contextlib.suppress(OSError, EOFError), gzip.open(QEMU_CHANGELOG, "rt", errors="replace") as file:
        changelog = file.read()
    return known_holes(qemu_version(), changelog)


def _works(*argv: str) -> bool:
    done = subprocess.run(
        argv, capture_output=True, stdin=subprocess.DEVNULL, check=False, env=child_environment.for_program(os.environ)
    )
    return done.returncode == 0


def _makes_card() -> bool:
    """Returns whether a machine's management card can be made, by making one in the place of standard input."""
    argv = [sys.executable, "-m", confinement.__name__, "0", "true"]
    done = subprocess.run(
        argv, capture_output=True, stdin=subprocess.DEVNULL, check=False, env=child_environment.for_python(os.environ)
    )
    return done.returncode == 0


# Under working KVM, a kernel without a root file system panics about a second after its start, which ends QEMU.
TRIAL_SECONDS = 15
# setuid clears PR_SET_PDEATHSIG, so QEMU also runs in a PID namespace: when its init dies, the kernel kills the rest.
# That init is the shell: `exit` keeps it from replacing itself by its last command.
_PID_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--", "sh", "-c", '"$@"; exit', "sh")
CPU_INFO = Path("/proc/cpuinfo")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def kvm_works(kernel: Path, answer: Path) -> bool:
    """Returns whether a kernel boots under KVM here. Tried once per boot of the host.

    The device alone proves nothing: under some hypervisors it opens, QEMU starts, and the guest never gets anywhere.

    Args:
        kernel: a Linux kernel.
        answer: file in which the answer is kept.
    """
    works = known_answer(answer)
    if works is not None:
        return works
    works = _openable() and _boots(kernel)
    write_atomically(answer, json.dumps({"boot": _boot_id(), "works": works}))
    return works


def known_answer(answer: Path) -> bool | None:
    """Returns the result of the trial since the host booted; None if there was none."""
    try:
        trial = json.loads(answer.read_text())
        return bool(trial["works"]) if trial["boot"] == _boot_id() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def expects_kvm(answer: Path) -> bool | None:
    """Returns whether machines will start under KVM; None if the device can be used, and there was no trial yet."""
    known = known_answer(answer)
    return False if known is None and not _openable() else known


def processor() -> str:
    """Returns the name of this host's processor and a hash of what it can do, which machines under KVM see."""
    fields = dict.fromkeys(("model name", "flags"), "")
    for line in CPU_INFO.read_text().partition("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        if name.strip() in fields:
            fields[name.strip()] = value.strip()
    return f"{fields['model name']}, {hashlib.sha256(fields['flags'].encode()).hexdigest()[:8]}"


def _boot_id() -> str:
    return BOOT_ID.read_text().strip()


def _openable() -> bool:
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR))
    except OSError:
        return False
    return True


def _boots(kernel: Path) -> bool:
    user = own_user(kernel.parent)
    argv = [
        # A trial under broken KVM never ends by itself, and must not outlive a controller that is killed.
        *("setpriv", "--pdeathsig", "KILL", "--"),
        *(_PID_NAMESPACE if user else ()),
        *("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-machine", "q35,accel=kvm", "-cpu", "host", "-m", "256M", "-serial", "stdio"),
        *("-kernel", str(kernel), "-append", "console=ttyS0 panic=-1"),
        *confined(user),
    ]
    try:
        trial = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=TRIAL_SECONDS, check=False,
            env=child_environment.for_program(os.environ),
        )  # fmt: skip
    except (subprocess.TimeoutExpired, OSError):
        return False
    # QEMU returns 0 when a signal ends it, too.
    return trial.returncode == 0 and b"Linux version" in trial.stdout
