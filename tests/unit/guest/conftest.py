"""Provides a machine for the helper, and lets tests import what runs in machines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from provisioner.clouds.guest_files import GUEST
from tests.unit.guest.machine_directory import Machine

sys.path.insert(0, str(GUEST))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Returns a machine without a family."""
    return Machine(tmp_path)
