"""Tests how often destroying asks the cloud, with a cloud that records the calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from provisioner.clock import now
from provisioner.errors import InfrastructureError, StillThereError
from provisioner.machines.destroy import destroy_machines
from provisioner.models import Endpoint, Environment, MachineRecord, MachineSize, TaskSetup
from provisioner.session import Session
from provisioner.store.home import Home

PLACE = {"region": "crater"}


class CountingCloud:
    """Reports the given remaining resources, one list per call, and then none."""

    name = "moon"
    region = "crater"

    def __init__(self, answers: Sequence[list[str] | Exception] = ()) -> None:
        self._answers = list(answers)
        self.calls: list[str] = []

    def terraform_variables(self, ours: Mapping[str, str]) -> dict[str, str]:
        return {}

    def alive(self, _environment: Environment, _role: str) -> bool:
        return False

    def remaining(self, _: Environment) -> list[str]:
        self.calls.append("left")
        answer = self._answers.pop(0) if self._answers else []
        if isinstance(answer, Exception):
            raise answer
        return answer

    def remove(self, _: Environment) -> None:
        self.calls.append("remove")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setattr("provisioner.machines.destroy.SECOND_LOOK_SECONDS", 0.0)
    home = Home(tmp_path / "home")
    home.make()
    return home


def session_with(home: Home, cloud: CountingCloud) -> Session:
    return Session(home=home, cloud=cloud)  # type: ignore[arg-type]


def recorded(session: Session, *, stack: str = "env", came_up: bool = True, placed: bool = True) -> Environment:
    size = MachineSize(cpus=1, memory_gib=1, disk_gib=16)
    environment = Environment(
        id="env", cloud="moon", stack=stack, family="fam", task="main", status="ready", attended=True,
        created_at=now(), expires_at=now() + timedelta(hours=1), setup=TaskSetup(), full_internet=False,
        machines={"primary": MachineRecord(image="i", size=size, user="root")},
        endpoints={"primary": Endpoint(host="127.0.0.1", port=1)} if came_up else {},
        placement=PLACE if placed else {},
    )  # fmt: skip
    return session.environments.save(environment)


def test_the_cloud_is_asked_once_after_terraform(home: Home) -> None:
    cloud = CountingCloud()
    session = session_with(home, cloud)
    destroy_machines(session, recorded(session))
    assert cloud.calls == ["left"]
    assert session.environments.all() == []


def test_the_cloud_is_asked_once_after_a_removal(home: Home) -> None:
    cloud = CountingCloud()
    session = session_with(home, cloud)
    destroy_machines(session, recorded(session, stack="twenty"))
    assert cloud.calls == ["remove", "left"]


@pytest.mark.parametrize(
    ("stack", "first"), [("env", []), ("twenty", ["remove"])], ids=["after-terraform", "after-a-removal-by-hand"]
)
def test_remaining_resources_are_removed_after_a_second_look(home: Home, stack: str, first: list[str]) -> None:
    cloud = CountingCloud([["instance i-1"]])
    session = session_with(home, cloud)
    destroy_machines(session, recorded(session, stack=stack))
    assert cloud.calls == [*first, "left", "remove", "left"]


@pytest.mark.parametrize(
    ("answers", "calls"),
    [
        ([[]], ["left", "left"]),
        ([["instance i-1"]], ["left", "remove", "left"]),
        ([[], ["instance i-1"]], ["left", "left", "remove", "left"]),
    ],
    ids=["nothing-is-there", "something-shows-at-once", "something-shows-late"],
)
def test_the_cloud_is_asked_twice_after_an_unclear_apply(
    home: Home, answers: list[list[str]], calls: list[str]
) -> None:
    cloud = CountingCloud(answers)
    session = session_with(home, cloud)
    destroy_machines(session, recorded(session, came_up=False))
    assert cloud.calls == calls


def test_the_cloud_is_asked_once_if_no_apply_had_begun(home: Home) -> None:
    cloud = CountingCloud()
    session = session_with(home, cloud)
    destroy_machines(session, recorded(session, came_up=False, placed=False))
    assert cloud.calls == ["left"]


def test_an_environment_that_cannot_be_removed_keeps_its_record(home: Home) -> None:
    session = session_with(home, CountingCloud([["instance i-1"], ["instance i-1"]]))
    environment = recorded(session)
    with pytest.raises(StillThereError, match="env is not gone: instance i-1"):
        destroy_machines(session, environment)
    assert [kept.status for kept in session.environments.all()] == ["destroying"]


def test_the_end_is_unverified_if_the_cloud_does_not_answer(home: Home) -> None:
    cloud = CountingCloud([InfrastructureError("EC2 does not answer.")])
    session = session_with(home, cloud)
    environment = recorded(session)
    with pytest.raises(StillThereError, match=r"the cloud did not say whether anything remains: EC2 does not answer\."):
        destroy_machines(session, environment)
    assert cloud.calls == ["left"]
    assert [kept.status for kept in session.environments.all()] == ["unverified"]
