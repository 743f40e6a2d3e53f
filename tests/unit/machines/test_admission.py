"""A controller whose address has changed is let in before it connects; tests/aws shows what a cloud does then."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from provisioner.errors import HostError
from provisioner.machines.connect import connect
from provisioner.models import Environment
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import told_of, up


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
