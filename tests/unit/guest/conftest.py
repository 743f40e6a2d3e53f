"""Provides a machine for the helper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.guest.machine_directory import Machine
from tests.unit.guest.warm_machine import is_warm, with_python


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Yields a machine without a family, and ends its warm interpreter."""
    machine = Machine(tmp_path)
    yield machine
    machine.end()


@pytest.fixture
def warm(machine: Machine) -> Machine:
    """Returns a machine with a Python of its own and a warm interpreter of it."""
    with_python(machine)
    assert is_warm(machine) is False
    assert is_warm(machine) is True
    return machine
