"""One environment of the lab family, shared by the tests that look at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from provisioner import lifecycle, machines
from provisioner.models import Environment, Role
from provisioner.session import Session
from provisioner.ssh import Completed
from provisioner.task_family import load_family

FAMILIES = Path(__file__).parent / "families"
TOKEN = "tok-3f9a1c77e2-not-for-agents"
VARIABLES = {"LAB_TOKEN": TOKEN, "LAB_OTHER": "another-value-9d2b"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With pytest-xdist, one worker takes all tests that share the lab's environment."""
    for item in items:
        if "lab" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("lab"))


@dataclass(frozen=True)
class Lab:
    """A running environment and short ways into it."""

    session: Session
    environment: Environment

    def run(self, script: str, role: Role = "primary", user: str = "root") -> Completed:
        """Runs a shell script in a machine."""
        with machines.connect(self.session, self.environment, role, user) as connection:
            return connection.run(["bash", "-c", script])

    def text(self, script: str, role: Role = "primary", user: str = "root") -> str:
        """The output of a script that must succeed."""
        done = self.run(script, role, user)
        assert done.exit_code == 0, done.stderr.decode()
        return done.stdout.decode().strip()


@pytest.fixture(scope="session")
def lab_session(open_session: Callable[[Mapping[str, str]], Session]) -> Session:
    """A session with the lab family's secrets."""
    return open_session(VARIABLES)


@pytest.fixture(scope="session")
def lab(lab_session: Session) -> Iterator[Lab]:
    """The lab's environment, up."""
    environment = lifecycle.up(lab_session, load_family(FAMILIES / "lab"), "pair")
    yield Lab(lab_session, environment)
    lifecycle.destroy(lab_session, environment)
