"""Fixtures that every test with real machines shares. Images are cached outside the checkout."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from provisioner.clouds.local import LocalCloud
from provisioner.paths import Home
from provisioner.session import Session
from provisioner.settings import load_settings
from tests.provider_mirror import use_provider_mirror

pytest_plugins = ["tests.aws.ec2.fixture"]


def pytest_configure() -> None:
    """Terraform's provider comes from where it can be had."""
    use_provider_mirror()


def _cache() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "provisioner-tests"
    return Path(os.environ.get("PROVISIONER_TEST_HOME") or default)


@pytest.fixture(scope="session")
def test_home() -> Home:
    """A provisioner home that keeps its images between test runs. Each worker process of pytest-xdist has its own."""
    home = Home(_cache())
    home.make()
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    return borrow_images(home, home.root / "workers" / worker) if worker else home


def borrow_images(lender: Home, root: Path) -> Home:
    """A home that shares another's images and their locks, and what is known of KVM, and nothing else."""
    borrower = Home(root)
    borrower.make()
    for ours, theirs in ((borrower.images, lender.images), (borrower.locks, lender.locks)):
        if not ours.is_symlink():
            shutil.rmtree(ours)
            ours.symlink_to(theirs)
    known = lender.root / "kvm.json"
    if known.exists():
        shutil.copy(known, root)
    return borrower


@pytest.fixture(scope="session")
def open_session(test_home: Home) -> Iterator[Callable[[Mapping[str, str]], Session]]:
    """Opens sessions on the test home; nothing may exist in it when all tests are over."""

    def open_one(variables: Mapping[str, str]) -> Session:
        return Session(home=test_home, cloud=LocalCloud(test_home, load_settings()), variables=variables)

    before = set(test_home.environments.iterdir())
    yield open_one
    left = set(test_home.environments.iterdir()) - before
    assert left == set(), f"tests left environments behind: {left}"
