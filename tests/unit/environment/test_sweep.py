"""Tests what a sweep may remove, depending on resources, records and leases."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from provisioner.clouds.cloud import EnvironmentResources
from provisioner.clouds.local.cloud import LocalCloud
from provisioner.config import Settings
from provisioner.costs.ledger import Entry, Ledger
from provisioner.environment.sweep import find, judge, sweep
from provisioner.models import Environment, MachineRecord, MachineSize, Status, TaskSetup
from provisioner.session import Session
from provisioner.store.home import Home

HERE = "home-1"
NOW = datetime(2026, 1, 2, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def record(status: Status = "ready", *, attended: bool = False, left: timedelta = HOUR) -> Environment:
    size = MachineSize(cpus=1, memory_gib=1, disk_gib=16)
    return Environment(
        id="env", cloud="aws", stack="env", family="fam", task="main", status=status, attended=attended,
        created_at=NOW - 3 * HOUR, expires_at=NOW + left, setup=TaskSetup(), full_internet=False,
        machines={"primary": MachineRecord(image="i", size=size, user="root")},
    )  # fmt: skip


def found(**changes: object) -> EnvironmentResources:
    known: dict[str, Any] = {"environment": "env", "resources": ("instance i-1",), "created_at": NOW - 3 * HOUR}
    return EnvironmentResources(**{**known, **changes})


def verdict(
    resources: EnvironmentResources,
    record_here: Environment | None = None,
    *,
    attended: bool = False,
    older_than: timedelta = timedelta(0),
) -> str | None:
    return judge(resources, record_here, attended=attended, home=HERE, at=NOW, older_than=older_than)


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        (record(), None),
        (record("creating"), "the command that looked after it has ended"),
        (record("destroying"), "the command that looked after it has ended"),
        (record(attended=True), "the command that looked after it has ended"),
        (record("unverified"), "the cloud never confirmed its end"),
        (record(left=-HOUR), "its time to live ended 1h ago"),
    ],
)
def test_what_is_recorded_here_goes_when_nobody_looks_after_it(known: Environment, reason: str | None) -> None:
    assert verdict(found(home=HERE), known) == reason
    # Environments that a running command looks after, and young ones, are always left alone.
    assert verdict(found(home=HERE), known, attended=True) is None
    assert verdict(found(home=HERE), known, older_than=4 * HOUR) is None


def test_what_this_home_made_and_has_no_record_of_goes_at_once() -> None:
    assert verdict(found(home=HERE, expires_at=NOW + HOUR)) == "this home created it and has no record of it"
    assert verdict(found(home=HERE), attended=True) is None


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
    ],
)
def test_what_another_controller_made_goes_long_past_its_limit_alone(changes: dict[str, object], goes: bool) -> None:
    assert (verdict(found(home="home-2", **changes)) is not None) is goes
    assert (verdict(found(home="", **changes)) is not None) is goes


def test_a_shared_hold_is_settled_long_past_its_limit_if_nothing_of_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path / "home")
    home.make()
    session = Session(home=home, cloud=LocalCloud(home, Settings()))
    shared = Ledger(tmp_path / "shared.sqlite")
    at = datetime.now(UTC)
    for name, left in (("gone", -HOUR), ("exists", -HOUR), ("lives", HOUR)):
        shared.reserve(
            Entry(
                environment=name, kind="task", cloud="local", region="", family="fam", task="main", batch="b",
                project="", command="b", launched_at=at - 2 * HOUR, expires_at=at + left, reserved_micro_usd=10,
            )
        )  # fmt: skip
    monkeypatch.setattr(LocalCloud, "survey", lambda *_: [found(environment="exists", created_at=at)])
    monkeypatch.setattr(LocalCloud, "clear", lambda *_: True)
    sweep(session, lambda _: session, None, older_than=2 * HOUR, shared=shared)
    assert [entry.environment for entry in shared.entries(unsettled=True)] == ["exists", "lives"]


def test_a_sweep_of_one_cloud_leaves_the_others_environments_alone(tmp_path: Path) -> None:
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
