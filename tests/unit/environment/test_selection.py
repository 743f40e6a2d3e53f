"""Tests which environments a destroy is about, and that those whose records cannot be read are destroyed, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.base.errors import StillThereError, UsageError
from provisioner.base.models import Environment
from provisioner.costs.ledger import Entry
from provisioner.environment import lifecycle
from provisioner.environment.selection import destroy_damaged, select_for_destroy
from provisioner.machines import claims
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import created, environment, told_of, up


def ids(environments: list[Environment]) -> list[str]:
    return [record.id for record in environments]


def spoil(session: Session, name: str) -> Path:
    path = session.environments.directory(name) / "environment.json"
    path.write_text("{")
    return path


def unsettled(session: Session) -> list[Entry]:
    return session.ledger.entries(unsettled=True)


def test_a_destroy_by_name_finds_live_and_past_environments(session: Session) -> None:
    lifecycle.destroy(session, up(session, environment("gone-1")))
    session.environments.save(environment("here-1"))
    selection = select_for_destroy(session, ["here", "here-1", "gone-1"], everything=False)
    assert (ids(selection.live), selection.gone, selection.damaged) == (["here-1"], ["gone-1"], [])
    with pytest.raises(UsageError, match="There is no environment 'never'"):
        select_for_destroy(session, ["never"], everything=False)


def test_a_damaged_record_is_selected_beside_the_others(session: Session) -> None:
    session.environments.save(environment("here-1"))
    session.environments.save(environment("spoilt-1"))
    spoil(session, "spoilt-1")
    selection = select_for_destroy(session, ["spoilt", "spoilt-1", "here"], everything=False)
    assert (ids(selection.live), selection.damaged) == (["here-1"], ["spoilt-1"])


def test_destroy_all_includes_directories_without_a_record(session: Session) -> None:
    session.environments.save(environment("here"))
    session.environments.save(environment("spoilt"))
    spoil(session, "spoilt")
    session.environments.directory("crashed").mkdir()
    selection = select_for_destroy(session, [], everything=True)
    assert (ids(selection.live), selection.gone, selection.damaged) == (["here"], [], ["spoilt"])
    assert not session.environments.directory("crashed").exists()


def test_a_damaged_environment_is_destroyed_and_settled(session: Session, cloud: FakeCloud) -> None:
    created(session, claims.reserve(session, environment()))
    (session.environments.logs("env") / "start.log").write_text("kept")
    spoil(session, "env")
    destroy_damaged(session, "env")
    assert cloud.existing() == []
    assert unsettled(session) == []
    assert not session.environments.directory("env").exists()
    assert (session.home.archive / "env" / "logs" / "start.log").read_text() == "kept"
    assert told_of(session).notes == []


def test_an_environment_unknown_to_the_ledger_is_destroyed(session: Session, cloud: FakeCloud) -> None:
    created(session, environment())
    spoil(session, "env")
    destroy_damaged(session, "env")
    assert cloud.existing() == []
    assert "The ledger knows no launch of env" in told_of(session).notes[-1]


def test_what_would_not_go_keeps_its_reservation(
    session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    created(session, claims.reserve(session, environment()))
    spoil(session, "env")

    def stuck(*_: object) -> bool:
        raise StillThereError("It does not end.")

    monkeypatch.setattr(cloud, "delete_resources", stuck)
    with pytest.raises(StillThereError):
        destroy_damaged(session, "env")
    assert session.environments.directory("env").exists()
    assert len(unsettled(session)) == 1
    session.leases.release("env")
