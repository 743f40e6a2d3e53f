"""Tests the lifecycle that every cloud must pass. The fixture `session` opens a session on each cloud."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import pytest

from provisioner.clock import now
from provisioner.environment import extend, lifecycle
from provisioner.environment.agent import Agent, run_agent
from provisioner.errors import MachineLostError, UsageError
from provisioner.family.loader import load_family
from provisioner.machines.connect import connect
from provisioner.models import Environment
from provisioner.session import Session
from tests.aws.ec2.fixture import ec2_session

pytestmark = pytest.mark.vm
HERE = Path(__file__).parent


@pytest.fixture(
    params=["local", pytest.param("aws", marks=[pytest.mark.xdist_group("ec2"), pytest.mark.timeout(2400)])]
)
def session(request: pytest.FixtureRequest) -> Session:
    """Opens a session on each cloud in turn."""
    if request.param == "aws":
        return ec2_session(request.getfixturevalue("ec2_home"))
    open_session: Callable[[Mapping[str, str]], Session] = request.getfixturevalue("open_session")
    return open_session({})


def test_an_environment_lives_is_scored_ends_at_its_limit_and_leaves_nothing(session: Session) -> None:
    environment = lifecycle.up(session, load_family(HERE / "families" / "echo"), "main")
    try:
        assert session.environments.find(environment.id[-6:]).status == "ready"
        assert environment.probes
        done = run_agent(session, environment, Agent(HERE / "agents" / "writer", "bash write.sh"))
        assert (done.exit_code, done.stdout) == (0, b"agent\n/home/agent/scaffolding\n")
        assert lifecycle.score(session, environment)[1].score == 0.75
        with connect(session, environment, "primary", "agent") as connection:
            assert connection.run(["sh", "-c", "echo out; echo err >&2; exit 3"]).exit_code == 3
        longer = extend.extend(session, environment, timedelta(hours=1))
        assert longer.expires_at == environment.expires_at + timedelta(hours=1)
        _end_at_its_limit(session, longer)
    finally:
        lifecycle.destroy(session, environment)
    lifecycle.destroy(session, environment)
    assert session.cloud.remaining(environment) == []
    assert not session.environments.directory(environment.id).exists()
    assert not (session.home.stacks / environment.stack).exists()
    [entry] = [entry for entry in session.ledger.entries() if entry.environment == environment.id]
    assert entry.actual_micro_usd is not None


def test_an_unknown_task_creates_nothing(session: Session) -> None:
    before = session.environments.all()
    with pytest.raises(UsageError, match="main"):
        lifecycle.up(session, load_family(HERE / "families" / "echo"), "mainn")
    assert session.environments.all() == before


def _end_at_its_limit(session: Session, environment: Environment) -> None:
    """Checks that a machine ends at its time even if root in it tries to prevent that and a command is running."""
    with connect(session, environment, "primary") as connection:
        stopped = connection.run(["systemctl", "stop", "provisioner-ttl.timer"])
        assert stopped.exit_code == 0, stopped.stderr
        session.cloud.move_ttl(session.environments.update(environment, expires_at=now() + timedelta(seconds=10)))
        # A local machine's watchdog acts every half minute, the scheduler of the tests' account more often.
        with pytest.raises(MachineLostError):
            connection.run(["sleep", "180"])
    deadline = time.monotonic() + 30
    while session.cloud.alive(environment, "primary") and time.monotonic() < deadline:
        time.sleep(0.2)
    with pytest.raises(MachineLostError, match="no longer running"):
        connect(session, environment, "primary")
