"""Connections to machines that are up, and what is told of those that are not."""

from __future__ import annotations

from datetime import timedelta

import pytest

from provisioner.clock import now
from provisioner.errors import MachineLostError, UsageError
from provisioner.machines.connect import connect
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import created, environment, up


def test_a_machine_that_is_up_lets_root_and_its_agent_in(session: Session) -> None:
    running = up(session)
    with connect(session, running, "primary") as root, connect(session, running, "primary", "agent") as agent:
        assert root.run(["journalctl"]).stdout == b"a journal\n"
        assert agent.run(["sh", "-c", 'basename "$HOME"']).stdout == b"home-env-primary\n"


def test_a_machine_that_has_ended_is_told_with_the_way_to_clear_it_away(session: Session, cloud: FakeCloud) -> None:
    running = up(session)
    cloud.end_machine(running)
    with pytest.raises(MachineLostError) as caught:
        connect(session, running, "primary")
    assert caught.value.message == "The primary machine of env is no longer running."
    assert "provisioner destroy env" in (caught.value.hint or "")


def test_a_machine_that_ended_after_its_time_is_told_so(session: Session, cloud: FakeCloud) -> None:
    running = up(session)
    cloud.end_machine(running)
    past = session.environments.update(running, expires_at=now() - timedelta(seconds=1))
    with pytest.raises(MachineLostError, match="Its time to live has ended"):
        connect(session, past, "primary")


def test_a_machine_that_runs_and_refuses_is_not_called_ended(session: Session, cloud: FakeCloud) -> None:
    running = up(session)
    cloud.machine(running).sshd.authorize = lambda _user, _key: False
    with pytest.raises(MachineLostError, match="answers, but SSH fails"):
        connect(session, running, "primary")


def test_a_machine_that_was_never_up_is_bad_input(session: Session) -> None:
    [booting] = created(session, environment())
    with pytest.raises(UsageError, match="env is not up: its status is creating"):
        connect(session, booting, "primary")
    with pytest.raises(UsageError, match="env has no aux machine"):
        connect(session, booting, "aux")
