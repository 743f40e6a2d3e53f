"""Provides provisioner homes to tests, and the files that they keep between runs and share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from provisioner.store.home import Home


def cache() -> Path:
    """Returns the directory that is kept between test runs: PROVISIONER_TEST_HOME, or one in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "provisioner-tests"
    return Path(os.environ.get("PROVISIONER_TEST_HOME") or default)


def new_home(root: Path) -> Home:
    """Returns a home whose stacks reuse other tests' results of `terraform init`, which reads the provider's 700 MB."""
    home = Home(root)
    home.make()
    shared, ours = cache() / "initialised", home.stacks / ".initialised"
    shared.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not ours.exists():
        ours.symlink_to(shared)
    return home


def borrow_images(lender: Home, root: Path) -> Home:
    """Returns a home that shares another home's images, their locks and the result of the test for KVM."""
    borrower = new_home(root)
    for ours, theirs in ((borrower.images, lender.images), (borrower.locks, lender.locks)):
        if not ours.is_symlink():
            shutil.rmtree(ours)
            ours.symlink_to(theirs)
    kvm_result = lender.root / "kvm.json"
    if kvm_result.exists():
        shutil.copy(kvm_result, root)
    return borrower
