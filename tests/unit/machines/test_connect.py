"""Tests connections to machines that are up, and the errors for those that are not."""

from __future__ import annotations

from datetime import timedelta

import pytest

from provisioner.clock import now
from provisioner.errors import MachineLostError, UsageError
from provisioner.machines.connect import connect
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import created, environment, up


def test_root_and_the_agent_can_run_commands(session: Session) -> None:
    running = up(session)
    with connect(session, running, "primary") as connection:
        assert connection.run(["journalctl"]).stdout == b"a journal\n"
        assert connection.run(["sh", "-c", 'basename "$HOME"'], user="agent").stdout == b"home-env-primary\n"


def test_an_ended_machines_error_says_how_to_remove_it(session: Session, cloud: FakeCloud) -> None:
    running = up(session)
    cloud.end_machine(running)
    with pytest.raises(MachineLostError) as caught:
        connect(session, running, "primary")
    assert caught.value.message == "The primary machine of env is no longer running."
    assert "provisioner destroy env" in (caught.value.hint or "")


def test_the_error_says_if_the_time_to_live_has_ended(session: Session, cloud: FakeCloud) -> None:
    running = up(session)
    cloud.end_machine(running)
    past = session.environments.update(running, expires_at=now() - timedelta(seconds=1))
    with pytest.raises(MachineLostError, match="Its time to live has ended"):
        connect(session, past, "primary")


def test_a_refused_login_is_not_reported_as_an_ended_machine(session: Session, cloud: FakeCloud) -> None:
    running = up(session)
    cloud.machine(running).sshd.authorize = lambda _user, _key: False
    with pytest.raises(MachineLostError, match="answers, but SSH fails"):
        connect(session, running, "primary")


def test_connecting_to_a_machine_that_was_never_up_fails(session: Session) -> None:
    [booting] = created(session, environment())
    with pytest.raises(UsageError, match="env is not up: its status is creating"):
        connect(session, booting, "primary")
    with pytest.raises(UsageError, match="env has no aux machine"):
        connect(session, booting, "aux")
