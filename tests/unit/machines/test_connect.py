"""Tests connections to machines that are up, the errors for those that are not, and work on all machines at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest

from provisioner.base.clock import now
from provisioner.base.errors import HostError, MachineLostError, UsageError
from provisioner.base.models import Environment, Role
from provisioner.machines.connect import connect, on_all_machines
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import created, environment, told_of, up
from tests.waiting import BOUND_SECONDS


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


def test_a_moved_controller_is_let_in_before_it_connects(
    session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = up(session)
    let_in: list[str] = []

    def authorize(environment: Environment, open_network: Callable[[], None]) -> None:
        if environment.id not in let_in:
            open_network()
            let_in.append(environment.id)

    monkeypatch.setattr(cloud, "authorize", authorize)
    for _ in range(2):
        with connect(session, running, "primary") as connection:
            assert connection.run(["journalctl"]).exit_code == 0
    assert let_in == [running.id]
    assert sum("address has changed" in line for line in told_of(session).notes) == 1


def test_a_cloud_that_does_not_let_it_in_says_why(
    session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise HostError("The network was created by another controller.")

    running = up(session)
    monkeypatch.setattr(cloud, "authorize", refuse)
    with pytest.raises(HostError, match="another controller"):
        connect(session, running, "primary")


ROLES: dict[Role, object] = {"primary": None, "aux": None}


def test_work_runs_on_all_machines_at_once_and_gives_each_result() -> None:
    both = threading.Barrier(2, timeout=BOUND_SECONDS)

    def work(role: Role, _: threading.Event) -> str:
        both.wait()
        return role.upper()

    assert on_all_machines(ROLES, work) == {"primary": "PRIMARY", "aux": "AUX"}


def test_the_first_failure_is_raised_and_cancels_the_others() -> None:
    both = threading.Barrier(2, timeout=BOUND_SECONDS)
    stopped = threading.Event()

    def work(role: Role, cancelled: threading.Event) -> None:
        both.wait()
        if role == "primary":
            raise ValueError(role)
        assert cancelled.wait(BOUND_SECONDS)
        stopped.set()

    with pytest.raises(ValueError, match="primary"):
        on_all_machines(ROLES, work)
    assert stopped.wait(BOUND_SECONDS)


def test_a_failure_after_the_others_have_finished_is_raised() -> None:
    done = threading.Event()

    def work(role: Role, _: threading.Event) -> None:
        if role == "primary":
            done.set()
            return
        assert done.wait(BOUND_SECONDS)
        raise ValueError(role)

    with pytest.raises(ValueError, match="aux"):
        on_all_machines(ROLES, work)
