"""Whether this host's KVM works, found out by using it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from provisioner.store.files import write_atomically

# A kernel without a root file system panics, and ends QEMU, about a second after a start under working KVM.
TRIAL_SECONDS = 15
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def kvm_works(kernel: Path, answer: Path) -> bool:
    """Whether a kernel boots under KVM here. Tried once per boot of the host.

    The device proves nothing: under some hypervisors it opens, QEMU starts, and the guest never gets anywhere.

    Args:
        kernel: a Linux kernel.
        answer: file that keeps the answer.
    """
    known = known_answer(answer)
    if known is not None:
        return known
    works = _openable() and _boots(kernel)
    write_atomically(answer, json.dumps({"boot": _boot_id(), "works": works}))
    return works


def known_answer(answer: Path) -> bool | None:
    """What the trial of this boot of the host came to; None if there was none yet."""
    try:
        known = json.loads(answer.read_text())
        return bool(known["works"]) if known["boot"] == _boot_id() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _boot_id() -> str:
    return BOOT_ID.read_text().strip()


def _openable() -> bool:
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR))
    except OSError:
        return False
    return True


def _boots(kernel: Path) -> bool:
    argv = [
        # A trial under broken KVM never ends by itself: it must not outlive a controller that was killed.
        *("setpriv", "--pdeathsig", "KILL", "--"),
        *("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-machine", "q35,accel=kvm", "-cpu", "host", "-m", "256M", "-serial", "stdio"),
        *("-kernel", str(kernel), "-append", "console=ttyS0 panic=-1"),
    ]
    try:
        ended = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=TRIAL_SECONDS, check=False)
    except (subprocess.TimeoutExpired, OSError):
        return False
    # Whoever ends QEMU with a signal makes it return 0 too.
    return ended.returncode == 0 and b"Linux version" in ended.stdout
