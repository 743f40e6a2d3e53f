"""The fixture for a conftest: `from tests.aws.ec2.fixture import ec2_cloud`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.aws.ec2.cloud import Ec2Cloud


def cache() -> Path:
    """Where the AMI is kept between test runs."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "provisioner-tests"
    return Path(os.environ.get("PROVISIONER_TEST_HOME") or default) / "ec2"


@pytest.fixture(scope="session")
def ec2_cloud() -> Iterator[Ec2Cloud]:
    """EC2 with real machines behind it, for the whole session; no instance may be left when all tests are over."""
    with Ec2Cloud(cache()) as cloud:
        yield cloud
        left = cloud.left()
    assert left == [], f"tests left instances behind: {left}"
