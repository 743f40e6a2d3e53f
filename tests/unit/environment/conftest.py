"""Fixtures for tests of whole environments."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.base.models import Environment
from provisioner.environment import agent
from provisioner.family.loader import TaskFamily
from provisioner.session import Session
from tests.unit.fakes.clock import WaitingClock
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.guest import SETUP, Guest
from tests.unit.fakes.world import family, store_image, up


@pytest.fixture
def env(session: Session, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """Provides an environment that is up, and to which a connection that broke is tried again at once."""
    monkeypatch.setattr(agent, "PAUSES_SECONDS", (0.05,))
    return up(session)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> WaitingClock:
    """The clock of what follows an agent. It stands still unless the test moves it."""
    clock = WaitingClock()
    monkeypatch.setattr(agent, "time", clock)
    return clock


@pytest.fixture
def guest(env: Environment, cloud: FakeCloud) -> Guest:
    """Provides the stand-in for the primary machine's system in that environment."""
    return cloud.machine(env).guest


@pytest.fixture
def fam(session: Session, tmp_path: Path) -> TaskFamily:
    """Provides a family whose image is built, so that the next machine belongs to an environment."""
    fam = family(tmp_path)
    store_image(session, fam, SETUP)
    return fam
