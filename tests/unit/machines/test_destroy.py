"""Tests that destroying ends only when the cloud confirms it, whatever Terraform reports, and how often it is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from provisioner.base.errors import InfrastructureError, StillThereError, TerraformError
from provisioner.base.models import Endpoint, Environment
from provisioner.costs.ledger import Entry
from provisioner.machines import claims
from provisioner.machines.create import create_machines, record_environment
from provisioner.machines.destroy import destroy_machines
from provisioner.session import Session
from provisioner.store.files import is_locked
from provisioner.store.home import Home
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import created, environment, told_of


def reserved(session: Session, *new: Environment) -> list[Environment]:
    """Creates environments with machines, leases and reservations."""
    return created(session, *(claims.reserve(session, env) for env in new))


def unsettled(session: Session) -> list[Entry]:
    return session.ledger.entries(unsettled=True)


def test_a_destroyed_environment_is_gone_settled_and_archived(session: Session, cloud: FakeCloud) -> None:
    [env] = reserved(session, environment())
    lease = session.environments.lease("env")
    assert is_locked(lease)
    destroy_machines(session, env)
    assert cloud.existing() == []
    assert cloud.runs() == ["apply env", "destroy env"]
    assert not session.environments.directory("env").exists()
    assert not (session.home.stacks / "env").exists()
    assert session.environments.find("env", archived=True).status == "destroying"
    assert unsettled(session) == []
    assert not is_locked(lease)


def test_destroying_again_is_no_error(session: Session, cloud: FakeCloud) -> None:
    [env] = reserved(session, environment())
    destroy_machines(session, env)
    destroy_machines(session, env)
    assert cloud.runs() == ["apply env", "destroy env"]


def test_a_never_created_environment_needs_no_terraform(session: Session, cloud: FakeCloud) -> None:
    record_environment(session, environment())
    destroy_machines(session, environment())
    assert cloud.runs() == []
    assert not session.environments.directory("env").exists()


def test_a_machine_that_terraform_forgot_is_removed(session: Session, cloud: FakeCloud) -> None:
    record_environment(session, environment())
    cloud.terraform_fails(summary="Killed", creates=True)
    with pytest.raises(TerraformError):
        create_machines(session, [environment()])
    assert cloud.existing() == ["env/primary"]
    destroy_machines(session, session.environments.find("env"))
    assert cloud.existing() == []
    assert told_of(session).notes == ["Still there of env: primary machine; removing it"]
    assert not session.environments.directory("env").exists()


def test_a_terraform_failure_does_not_matter_once_all_is_gone(session: Session, cloud: FakeCloud) -> None:
    [env] = reserved(session, environment())
    cloud.terraform_fails("destroy")
    destroy_machines(session, env)
    assert cloud.existing() == []
    assert unsettled(session) == []
    assert not (session.home.stacks / "env").exists()


def test_an_existing_environment_keeps_its_reservation(session: Session, cloud: FakeCloud) -> None:
    [env] = reserved(session, environment())
    cloud.terraform_fails("destroy")
    cloud.faults.stuck = True
    with pytest.raises(StillThereError, match="env is not gone") as caught:
        destroy_machines(session, env)
    assert caught.value.hint == "provisioner destroy env tries again."
    assert session.environments.find("env").status == "destroying"
    assert [entry.environment for entry in unsettled(session)] == ["env"]
    cloud.faults.stuck = False
    destroy_machines(session, session.environments.find("env"))
    assert unsettled(session) == []


def test_the_end_is_unverified_if_the_cloud_cannot_be_reached(session: Session, cloud: FakeCloud) -> None:
    [env] = reserved(session, environment())
    cloud.faults.unreachable = True
    with pytest.raises(StillThereError, match="whether anything remains: The cloud does not answer"):
        destroy_machines(session, env)
    assert session.environments.find("env").status == "unverified"
    assert len(unsettled(session)) == 1


def test_the_last_environments_take_one_run_of_terraform(session: Session, cloud: FakeCloud) -> None:
    both = reserved(session, environment("one", stack="many"), environment("two", stack="many"))
    destroy_machines(session, *both)
    assert cloud.runs() == ["apply many", "destroy many"]
    assert cloud.existing() == []
    assert not (session.home.stacks / "many").exists()


def test_one_environment_is_removed_without_terraform(session: Session, cloud: FakeCloud) -> None:
    first, second = reserved(session, environment("one", stack="many"), environment("two", stack="many"))
    destroy_machines(session, first)
    assert cloud.runs() == ["apply many"]
    assert cloud.existing() == ["two/primary"]
    destroy_machines(session, second)
    assert cloud.existing() == []
    assert not (session.home.stacks / "many").exists()


def test_several_environments_go_in_one_run_of_terraform(session: Session, cloud: FakeCloud) -> None:
    new = [environment(name, stack="many") for name in ("one", "two", "three")]
    first, second, _ = reserved(session, *new)
    destroy_machines(session, first, second)
    assert cloud.runs() == ["apply many", "apply many"]
    assert cloud.existing() == ["three/primary"]


def test_only_the_environments_that_are_gone_are_settled(session: Session, cloud: FakeCloud) -> None:
    first, second = reserved(session, environment("one", stack="many"), environment("two", stack="many"))
    cloud.end_machine(first)
    cloud.terraform_fails("destroy")
    cloud.faults.stuck = True
    with pytest.raises(StillThereError) as caught:
        destroy_machines(session, first, second)
    assert caught.value.message.startswith("two is not gone")
    assert [entry.environment for entry in unsettled(session)] == ["two"]
    assert [env.id for env in session.environments.all()] == ["two"]


def test_the_actual_cost_is_settled(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    cloud.usd = cloud.usd + 6
    [env] = reserved(session, environment())
    [reservation] = unsettled(session)
    destroy_machines(session, env)
    [entry] = session.ledger.entries()
    # At least a minute is billed, and the test took less.
    assert (entry.actual_micro_usd, entry.ended_at is None) == (100_000, False)
    assert reservation.reserved_micro_usd == 14_000_000  # an hour and ten minutes at the worst price


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

    def end_machines(self, _: object) -> set[str]:
        return set()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setattr("provisioner.machines.destroy.SECOND_LOOK_SECONDS", 0.0)
    home = Home(tmp_path / "home")
    home.make()
    return home


def session_with(home: Home, cloud: CountingCloud) -> Session:
    return Session(home=home, cloud=cloud)  # type: ignore[arg-type]


def recorded(session: Session, *, stack: str = "env", came_up: bool = True, placed: bool = True) -> Environment:
    endpoints = {"primary": Endpoint(host="127.0.0.1", port=1)} if came_up else {}
    placement = PLACE if placed else {}
    return session.environments.save(environment(stack=stack, status="ready", endpoints=endpoints, placement=placement))


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
