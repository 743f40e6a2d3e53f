"""Tests which resources a sweep may remove, depending on records and leases."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.config import Settings
from provisioner.base.models import Environment, Status
from provisioner.clouds.cloud import EnvironmentResources
from provisioner.clouds.local.cloud import LocalCloud
from provisioner.costs.ledger import Entry, Ledger
from provisioner.environment import snapshots
from provisioner.environment.sweep import find, orphan_reason, sweep
from provisioner.machines import claims
from provisioner.session import Session
from provisioner.store.home import UNFINISHED, Home
from provisioner.store.snapshots import SnapshotStore
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import created, environment, told_of, up

HERE = "home-1"
NOW = datetime(2026, 1, 2, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def record(status: Status = "ready", *, attended: bool = False, remaining: timedelta = HOUR) -> Environment:
    begin, end = NOW - 3 * HOUR, NOW + remaining
    return environment(cloud="aws", status=status, attended=attended, created_at=begin, expires_at=end)


def surveyed(**changes: object) -> EnvironmentResources:
    defaults: dict[str, Any] = {"environment": "env", "resources": ("instance i-1",), "created_at": NOW - 3 * HOUR}
    return EnvironmentResources(**{**defaults, **changes})


def verdict(
    resources: EnvironmentResources,
    record_here: Environment | None = None,
    *,
    attended: bool = False,
    older_than: timedelta = timedelta(0),
) -> str | None:
    return orphan_reason(resources, record_here, attended=attended, home=HERE, at=NOW, older_than=older_than)


@pytest.mark.parametrize(
    ("recorded", "reason"),
    [
        (record(), None),
        (record("creating"), "the command that managed it has ended"),
        (record("destroying"), "the command that managed it has ended"),
        (record(attended=True), "the command that managed it has ended"),
        (record("unverified"), "the cloud never confirmed its end"),
        (record(remaining=-HOUR), "its time to live ended 1h ago"),
    ],
)
def test_an_unattended_environment_is_removed(recorded: Environment, reason: str | None) -> None:
    assert verdict(surveyed(home=HERE), recorded) == reason
    # Environments that a running command looks after, and young ones, are always left alone.
    assert verdict(surveyed(home=HERE), recorded, attended=True) is None
    assert verdict(surveyed(home=HERE), recorded, older_than=4 * HOUR) is None


def test_an_environment_from_before_the_clock_was_set_back_is_removed() -> None:
    ahead = record("destroying").model_copy(update={"created_at": NOW + 3 * HOUR})
    assert verdict(surveyed(home=HERE), ahead) == "the command that managed it has ended"
    assert verdict(surveyed(home=HERE), ahead, older_than=HOUR) is None


def test_an_environment_without_a_record_is_removed_at_once() -> None:
    assert verdict(surveyed(home=HERE, expires_at=NOW + HOUR)) == "this home created it and has no record of it"
    assert verdict(surveyed(home=HERE), attended=True) is None


@pytest.mark.parametrize(
    ("changes", "goes"),
    [
        ({"expires_at": NOW + HOUR}, False),
        ({"expires_at": NOW - timedelta(minutes=9)}, False),
        ({"expires_at": NOW - timedelta(minutes=11)}, True),
        ({"expires_at": NOW - HOUR, "leased_until": NOW + timedelta(minutes=1)}, False),
        ({"expires_at": NOW - HOUR, "leased_until": NOW - timedelta(minutes=1)}, True),
        ({}, False),
        ({"created_at": None}, False),
        ({"created_at": NOW - timedelta(days=6)}, False),
        ({"created_at": NOW - timedelta(days=8)}, True),
        ({"created_at": datetime.max.replace(tzinfo=UTC)}, False),
        ({"expires_at": datetime.max.replace(tzinfo=UTC)}, False),
    ],
)
def test_another_controllers_environment_is_removed_late(changes: dict[str, object], goes: bool) -> None:
    assert (verdict(surveyed(home="home-2", **changes)) is not None) is goes
    assert (verdict(surveyed(home="", **changes)) is not None) is goes


def test_an_old_shared_reservation_is_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "home")
    home.make()
    session = Session(home=home, cloud=LocalCloud(home, Settings()))
    shared = Ledger(tmp_path / "shared.sqlite")
    at = datetime.now(UTC)
    forged = datetime.max.replace(tzinfo=UTC) - at
    for name, remaining in (("gone", -HOUR), ("exists", -HOUR), ("lives", HOUR), ("forged", forged)):
        shared.reserve(
            Entry(
                environment=name, kind="task", cloud="local", region="", family="fam", task="main", batch="b",
                project="", command="b", launched_at=at - 2 * HOUR, expires_at=at + remaining, reserved_micro_usd=10,
            )
        )  # fmt: skip
    monkeypatch.setattr(LocalCloud, "list_resources", lambda *_: [surveyed(environment="exists", created_at=at)])
    monkeypatch.setattr(LocalCloud, "delete_resources", lambda *_: True)
    sweep(session, lambda _: session, None, older_than=2 * HOUR, shared=shared)
    assert [entry.environment for entry in shared.entries(unsettled=True)] == ["exists", "forged", "lives"]


def test_a_snapshot_whose_making_was_cut_short_is_removed(session: Session) -> None:
    left = session.home.snapshots / f"{UNFINISHED}saved" / "primary"
    left.mkdir(parents=True)
    assert sweep(session, lambda _: session, None) == []
    assert list(session.home.snapshots.iterdir()) == []
    assert told_of(session).notes == [f"Removed the unfinished snapshot {UNFINISHED}saved"]


def test_an_attended_snapshot_whose_process_has_ended_is_removed(session: Session) -> None:
    running = up(session, environment())
    for name in ("left", "used"):
        snapshots.freeze(session, running, name, attended=True)
    snapshots.leave(session, "left")
    told = told_of(session)
    told.notes.clear()
    sweep(session, lambda _: session, None, older_than=HOUR, dry_run=True)
    assert told.notes == ["Would remove the snapshot left, whose command has ended"]
    assert len(SnapshotStore(session.home).all()) == 2
    told.notes.clear()
    sweep(session, lambda _: session, None, older_than=HOUR)
    assert told.notes == ["Removed the snapshot left, whose command has ended"]
    assert [each.name for each in SnapshotStore(session.home).all()] == ["used"]


def test_a_sweep_leaves_other_clouds_alone(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.make()
    session = Session(home=home, cloud=LocalCloud(home, Settings()))
    session.environments.save(record())  # of aws
    session.environments.save(record("creating").model_copy(update={"id": "mine", "cloud": "local"}))
    (home.environments / "nobodys").mkdir()
    assert [orphan.environment for orphan in find(session, None, timedelta(0))] == ["mine", "nobodys"]
    # An environment whose record cannot be read is left alone.
    (home.environments / "mine" / "environment.json").write_text("{")
    assert [orphan.environment for orphan in find(session, None, timedelta(0))] == ["nobodys"]


def test_an_unreadable_environment_is_swept_long_after_its_end(
    session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    created(session, claims.reserve(session, environment()))
    session.leases.release("env")
    (session.environments.directory("env") / "environment.json").write_text("{")
    monkeypatch.setattr("provisioner.environment.sweep.PASS_SECONDS", 0.0)
    assert sweep(session, lambda _: session, None) == []
    assert told_of(session).notes[0].startswith("env is not removed: The record")
    assert "provisioner destroy env" in told_of(session).notes[0]
    soon = datetime.now(UTC) + 2 * HOUR
    monkeypatch.setattr("provisioner.environment.sweep.now", lambda: soon)
    monkeypatch.setattr(cloud, "list_resources", lambda _: [surveyed(home=session.home.identity)])
    [orphan] = sweep(session, lambda _: session, None)
    assert (orphan.environment, orphan.problem) == ("env", "")
    assert cloud.existing() == []
    assert not session.environments.directory("env").exists()
    assert session.ledger.entries(unsettled=True) == []


def test_an_orphan_that_fails_keeps_no_other_alive(
    session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    created(session, environment("one"))
    created(session, environment("two"))
    monkeypatch.setattr("provisioner.environment.sweep.PASS_SECONDS", 0.0)

    monkeypatch.setattr(cloud, "list_resources", lambda _: [])  # the records say enough

    def session_of(environment: Environment) -> Session:
        if environment.id == "one":
            raise TypeError("unforeseen")
        return session

    orphans = sweep(session, session_of, None)
    assert {each.environment: each.problem for each in orphans} == {"one": "TypeError unforeseen", "two": ""}
    assert cloud.existing() == ["one/primary"]


def test_an_interruption_ends_a_sweep(session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provisioner.environment.sweep.PASS_SECONDS", 0.0)
    monkeypatch.setattr(cloud, "list_resources", lambda _: [])
    created(session, environment("one"))
    created(session, environment("two"))
    tried = []

    def session_of(environment: Environment) -> Session:
        tried.append(environment.id)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(session, session_of, None)
    assert len(tried) == 1
