"""Tests that destroying ends only when the cloud confirms it, whatever Terraform reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from provisioner.costs.ledger import Entry
from provisioner.errors import InfrastructureError, StillThereError, TerraformError
from provisioner.machines import launch
from provisioner.machines.create import create_machines, record_environment
from provisioner.machines.destroy import destroy_machines
from provisioner.models import Environment
from provisioner.session import Session
from provisioner.store.locks import is_locked
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import created, environment, told_of, up


def reserved(session: Session, *new: Environment) -> list[Environment]:
    """Creates environments with machines, leases and reservations."""
    return created(session, *(launch.reserve(session, env) for env in new))


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


def test_a_full_disk_does_not_keep_machines_alive(
    session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = up(session)

    def full(*_: Any) -> Any:
        raise OSError("No space left on device")

    monkeypatch.setattr("provisioner.store.environments.write_atomically", full)
    with pytest.raises((OSError, InfrastructureError)):  # the archive cannot be written either
        destroy_machines(session, env)
    assert cloud.existing() == []


def test_the_actual_cost_is_settled(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    cloud.usd = cloud.usd + 6
    [env] = reserved(session, environment())
    [reservation] = unsettled(session)
    destroy_machines(session, env)
    [entry] = session.ledger.entries()
    # At least a minute is billed, and the test took less.
    assert (entry.actual_micro_usd, entry.ended_at is None) == (100_000, False)
    assert reservation.reserved_micro_usd == 14_000_000  # an hour and ten minutes at the worst price
