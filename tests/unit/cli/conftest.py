"""A home for the commands' tests."""

from __future__ import annotations

import pytest

from provisioner.store.environments import EnvironmentStore
from provisioner.store.home import Home
from tests.unit.conftest import CommandLine


@pytest.fixture
def store(provisioner: CommandLine) -> EnvironmentStore:
    """The environments of the command line's home."""
    home = Home(provisioner.home)
    home.make()
    return EnvironmentStore(home)
