"""Fixtures for tests of whole environments."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.family.loader import TaskFamily
from provisioner.session import Session
from tests.unit.fakes.guest import SETUP
from tests.unit.fakes.world import family, store_image


@pytest.fixture
def fam(session: Session, tmp_path: Path) -> TaskFamily:
    """Provides a family whose image is built, so that the next machine belongs to an environment."""
    fam = family(tmp_path)
    store_image(session, fam, SETUP)
    return fam
