"""Tests the commands around snapshots that need no machine."""

from __future__ import annotations

import pytest

from provisioner.base.clock import now
from provisioner.cli.commands.image import _in_use
from provisioner.cli.sessions import session
from provisioner.store.home import Home
from provisioner.store.snapshots import Snapshot, SnapshotStore
from tests.unit.conftest import CommandLine, nothing_was_created
from tests.unit.fakes.world import environment


def kept(provisioner: CommandLine, name: str) -> Snapshot:
    """Returns a snapshot without machines."""
    home = Home(provisioner.home)
    home.make()
    snapshot = Snapshot(name=name, frozen_at=now(), environment=environment(), needs={})
    (provisioner.home / "keys").mkdir()
    with SnapshotStore(home).making(name, lambda: None):
        SnapshotStore(home).finish(snapshot, provisioner.home / "keys")
    return snapshot


def test_snapshots_are_listed_and_removed(provisioner: CommandLine) -> None:
    snapshot = kept(provisioner, "before-the-hint")
    [listed] = provisioner("snapshot", "list", "--json").json["snapshots"]
    assert (listed["name"], listed["of"], listed["frozen_at"]) == (
        "before-the-hint", "env", snapshot.frozen_at.isoformat(),
    )  # fmt: skip
    assert "before-the-hint" in provisioner("snapshot", "list").stdout
    assert provisioner("snapshot", "remove", "--json", "before-the-hint").json["removed"] == ["before-the-hint"]
    assert provisioner("snapshot", "list", "--json").json["snapshots"] == []


def test_an_image_of_a_snapshot_is_in_use(provisioner: CommandLine) -> None:
    kept(provisioner, "saved")
    assert _in_use(session()) == {"base"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["up"], "Give FAMILY and TASK, or --from NAME"),
        (["up", "family"], "Give FAMILY and TASK, or --from NAME"),
        (["up", "family", "main", "--from", "saved"], "--from takes no FAMILY"),
        (["up", "--from", "saved", "--allow", "example.com:443"], "--from takes no FAMILY"),
        (["up", "--from", "saved"], "There is no snapshot 'saved'"),
        (["up", "--from", "../saved"], "There is no snapshot"),
        (["snapshot", "remove", "saved"], "There is no snapshot 'saved'"),
        (["freeze", "env", "saved"], "There is no environment 'env'"),
    ],
    ids=["nothing", "no-task", "both", "allow", "unknown", "path", "remove", "environment"],
)
def test_what_cannot_be_done_is_a_usage_error(provisioner: CommandLine, arguments: list[str], says: str) -> None:
    ended = provisioner(*arguments)
    assert (ended.code, says in ended.stderr) == (2, True), ended.stderr
    assert nothing_was_created(provisioner.home)
