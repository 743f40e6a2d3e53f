"""Tests which Terraform root an environment belongs to, and the removal of unused roots."""

from __future__ import annotations

from provisioner.machines.create import discard_unused_stacks, stack_of
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import created, environment


def stacks(session: Session) -> set[str]:
    return {path.name for path in session.home.stacks.glob("[!.]*")}


def test_environments_of_one_stack_share_their_root(session: Session) -> None:
    stack_of(session, environment("one", stack="many")).write({"main.tf": "here"})
    assert stack_of(session, environment("two", stack="many")).exists
    assert not stack_of(session, environment("three")).exists


def test_stacks_without_environments_are_removed(session: Session, cloud: FakeCloud) -> None:
    created(session, environment())
    for name in ("unused", "network-crater"):
        (session.home.stacks / name).mkdir()
    discard_unused_stacks(session)
    assert stacks(session) == {"env", "network-crater"}
    assert (session.home.stacks / ".initialised").is_dir()
    assert cloud.existing() == ["env/primary"]


def test_no_stack_is_removed_while_a_record_cannot_be_read(session: Session) -> None:
    session.environments.save(environment())
    (session.environments.directory("env") / "environment.json").write_text("{")
    (session.home.stacks / "env").mkdir()
    discard_unused_stacks(session)
    assert stacks(session) == {"env"}
