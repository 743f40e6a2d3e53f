"""Says what the tests' machines run under, as it was tried on this host. Usage: python -m tests.accelerator"""

from __future__ import annotations

import os
from pathlib import Path

from provisioner.clouds.local.cloud import KVM_ANSWER
from provisioner.clouds.local.host import known_answer, kvm_works
from tests.homes import cache


def accelerator(home: Path) -> str:
    """Returns one line: the accelerator, and why. Tries KVM if that was not done since the host booted.

    Args:
        home: the tests' home. Without a base image in it there is no kernel to try, so the first machine does that.
    """
    # Each worker of pytest-xdist tries for itself where there was no base image when it began.
    answers = [home / KVM_ANSWER, *sorted(home.glob(f"workers/*/{KVM_ANSWER}"))]
    known = [works for answer in answers if (works := known_answer(answer)) is not None]
    if not known:
        kernels = sorted(home.glob("images/base-*/vmlinuz"))
        if not kernels:
            return "not tried yet, since there is no base image"
        known = [kvm_works(kernels[0], answers[0])]
    if all(known):
        return "kvm (tried: a kernel boots under KVM)"
    device = "a kernel does not boot under KVM" if os.access("/dev/kvm", os.R_OK | os.W_OK) else "no usable /dev/kvm"
    return f"tcg (tried: {device})"


if __name__ == "__main__":
    print(f"accelerator: {accelerator(cache())}")
