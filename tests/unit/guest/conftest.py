"""Provides a machine for the helper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.guest.machine_directory import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Yields a machine without a family, and ends its warm interpreter."""
    machine = Machine(tmp_path)
    yield machine
    machine.end()
