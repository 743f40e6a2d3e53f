"""Provides provisioner homes to tests, and the files that they keep between runs and share."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from provisioner.base.models import SetupData
from provisioner.inspect.compose import fetched
from provisioner.store.home import Home
from provisioner.store.images import Image


def cache() -> Path:
    """Returns the directory that is kept between test runs, in PROVISIONER_TEST_HOME or in the user's cache.

    Checkouts share one only if they write the same records of images: one version does not read another's.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "provisioner-tests"
    return Path(os.environ.get("PROVISIONER_TEST_HOME") or default) / format_key(Image, SetupData)


def format_key(*records: type[BaseModel]) -> str:
    """Returns a short hash of how records look, whatever their documentation says."""
    schemas = [_without_words(record.model_json_schema()) for record in records]
    return hashlib.sha256(json.dumps(schemas, sort_keys=True).encode()).hexdigest()[:8]


def _without_words(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_words(each) for each in schema]
    if isinstance(schema, dict):
        return {
            key: _without_words(value)
            for key, value in schema.items()
            if key != "description" or isinstance(value, dict)
        }
    return schema


def new_home(root: Path) -> Home:
    """Returns a home whose stacks reuse other tests' results of `terraform init`, which reads the provider's 700 MB."""
    home = Home(root)
    home.make()
    shared, ours = cache() / "initialised", home.stacks / ".initialised"
    shared.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not ours.exists():
        ours.symlink_to(shared)
    composes = root / "compose"
    if root != cache() and not composes.exists():
        (cache() / "compose").mkdir(mode=0o700, exist_ok=True)
        composes.symlink_to(cache() / "compose")
    return home


def compose() -> Path:
    """Returns Debian's Docker Compose, which is fetched once, whatever this computer has."""
    return fetched(Home(cache()))


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
