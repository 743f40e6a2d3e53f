"""Destroying until the cloud says that all is gone; Terraform's word is not taken for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from provisioner.costs.ledger import Entry
from provisioner.errors import InfrastructureError, StillThereError, TerraformError
from provisioner.machines import reservations
from provisioner.machines.create import create_machines, record_environment
from provisioner.machines.destroy import destroy_machines
from provisioner.models import Environment
from provisioner.session import Session
from provisioner.store.locks import is_locked
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import created, environment, told_of, up


def reserved(session: Session, *new: Environment) -> list[Environment]:
    """Environments whose machines exist, with their lease and their reservation."""
    return created(session, *(reservations.reserve(session, one) for one in new))


def unsettled(session: Session) -> list[Entry]:
    return session.ledger.entries(unsettled=True)


def test_what_is_destroyed_is_gone_settled_and_archived(session: Session, cloud: FakeCloud) -> None:
    [one] = reserved(session, environment())
    lease = session.environments.lease("env")
    assert is_locked(lease)
    destroy_machines(session, one)
    assert cloud.existing() == []
    assert cloud.runs() == ["apply env", "destroy env"]
    assert not session.environments.directory("env").exists()
    assert not (session.home.stacks / "env").exists()
    assert session.environments.find("env", archived=True).status == "destroying"
    assert unsettled(session) == []
    assert not is_locked(lease)


def test_destroying_again_is_no_error(session: Session, cloud: FakeCloud) -> None:
    [one] = reserved(session, environment())
    destroy_machines(session, one)
    destroy_machines(session, one)
    assert cloud.runs() == ["apply env", "destroy env"]


def test_what_was_recorded_and_never_created_goes_without_terraform(session: Session, cloud: FakeCloud) -> None:
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


def test_a_terraform_that_fails_does_not_matter_once_all_is_gone(session: Session, cloud: FakeCloud) -> None:
    [one] = reserved(session, environment())
    cloud.terraform_fails("destroy")
    destroy_machines(session, one)
    assert cloud.existing() == []
    assert unsettled(session) == []
    assert not (session.home.stacks / "env").exists()


def test_what_does_not_go_keeps_its_record_and_its_reservation(session: Session, cloud: FakeCloud) -> None:
    [one] = reserved(session, environment())
    cloud.terraform_fails("destroy")
    cloud.faults.stuck = True
    with pytest.raises(StillThereError, match="env is not gone") as caught:
        destroy_machines(session, one)
    assert caught.value.hint == "provisioner destroy env tries again."
    assert session.environments.find("env").status == "destroying"
    assert [entry.environment for entry in unsettled(session)] == ["env"]
    cloud.faults.stuck = False
    destroy_machines(session, session.environments.find("env"))
    assert unsettled(session) == []


def test_a_cloud_that_cannot_be_asked_leaves_the_end_unverified(session: Session, cloud: FakeCloud) -> None:
    [one] = reserved(session, environment())
    cloud.faults.unreachable = True
    with pytest.raises(StillThereError, match="the cloud did not say what is left: The cloud does not answer"):
        destroy_machines(session, one)
    assert session.environments.find("env").status == "unverified"
    assert len(unsettled(session)) == 1


def test_the_last_environments_of_a_stack_take_one_run_of_terraform(session: Session, cloud: FakeCloud) -> None:
    both = reserved(session, environment("one", stack="many"), environment("two", stack="many"))
    destroy_machines(session, *both)
    assert cloud.runs() == ["apply many", "destroy many"]
    assert cloud.existing() == []
    assert not (session.home.stacks / "many").exists()


def test_one_of_several_is_removed_without_terraform_and_the_others_live_on(session: Session, cloud: FakeCloud) -> None:
    one, two = reserved(session, environment("one", stack="many"), environment("two", stack="many"))
    destroy_machines(session, one)
    assert cloud.runs() == ["apply many"]
    assert cloud.existing() == ["two/primary"]
    destroy_machines(session, two)
    assert cloud.existing() == []
    assert not (session.home.stacks / "many").exists()


def test_several_that_leave_others_behind_take_one_run_of_terraform(session: Session, cloud: FakeCloud) -> None:
    new = [environment(name, stack="many") for name in ("one", "two", "three")]
    one, two, _ = reserved(session, *new)
    destroy_machines(session, one, two)
    assert cloud.runs() == ["apply many", "apply many"]
    assert cloud.existing() == ["three/primary"]


def test_of_several_only_what_is_gone_is_settled(session: Session, cloud: FakeCloud) -> None:
    one, two = reserved(session, environment("one", stack="many"), environment("two", stack="many"))
    cloud.end_machine(one)
    cloud.terraform_fails("destroy")
    cloud.faults.stuck = True
    with pytest.raises(StillThereError) as caught:
        destroy_machines(session, one, two)
    assert caught.value.message.startswith("two is not gone")
    assert [entry.environment for entry in unsettled(session)] == ["two"]
    assert [one.id for one in session.environments.all()] == ["two"]


def test_a_full_disk_does_not_keep_machines_alive(
    session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = up(session)

    def full(*_: Any) -> Any:
        raise OSError("No space left on device")

    monkeypatch.setattr("provisioner.store.environments.write_atomically", full)
    with pytest.raises((OSError, InfrastructureError)):  # the archive cannot be written either
        destroy_machines(session, one)
    assert cloud.existing() == []


def test_what_is_settled_is_what_it_did_cost(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    cloud.usd = cloud.usd + 6
    [one] = reserved(session, environment())
    [held] = unsettled(session)
    destroy_machines(session, one)
    [entry] = session.ledger.entries()
    # A minute is billed at least, and the test took less.
    assert (entry.actual_micro_usd, entry.ended_at is None) == (100_000, False)
    assert held.reserved_micro_usd == 14_000_000  # an hour and ten minutes at the worst price
