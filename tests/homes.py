"""Homes of tests: where they keep what outlives a test run, and what they share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from provisioner.store.home import Home


def cache() -> Path:
    """The directory that is kept between test runs, outside the checkout: PROVISIONER_TEST_HOME, or the user's."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "provisioner-tests"
    return Path(os.environ.get("PROVISIONER_TEST_HOME") or default)


def new_home(root: Path) -> Home:
    """A home whose stacks borrow what `terraform init` made for other tests: it reads the provider's 700 MB."""
    home = Home(root)
    home.make()
    shared, ours = cache() / "initialised", home.stacks / ".initialised"
    shared.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not ours.exists():
        ours.symlink_to(shared)
    return home


def borrow_images(lender: Home, root: Path) -> Home:
    """A home that shares another's images and their locks, and what is known of KVM."""
    borrower = new_home(root)
    for ours, theirs in ((borrower.images, lender.images), (borrower.locks, lender.locks)):
        if not ours.is_symlink():
            shutil.rmtree(ours)
            ours.symlink_to(theirs)
    known = lender.root / "kvm.json"
    if known.exists():
        shutil.copy(known, root)
    return borrower
