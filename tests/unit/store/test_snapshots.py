"""Tests the store of snapshots: each is whole or absent."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.base.clock import now
from provisioner.base.errors import InfrastructureError, UsageError
from provisioner.ssh.keys import ed25519_key_pair
from provisioner.store import snapshots
from provisioner.store.home import UNFINISHED, Home
from provisioner.store.snapshots import RECORD, Snapshot, SnapshotStore
from tests.unit.fakes.world import environment

PAIR = ed25519_key_pair()


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    home = Home(tmp_path / "home")
    home.make()
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "controller").write_text(PAIR.private)
    (keys / "controller.pub").write_text(PAIR.public + "\n")
    return SnapshotStore(home)


def nobody() -> None:
    raise AssertionError("nobody else makes it")


def make(store: SnapshotStore, tmp_path: Path, name: str) -> Snapshot:
    before = store.all()
    snapshot = Snapshot(name=name, frozen_at=now(), environment=environment(), needs={"QEMU": "7.2"})
    with store.making(name, nobody) as directory:
        (directory / "primary").mkdir()
        (directory / "primary" / "memory").write_bytes(b"x" * 8192)
        assert store.all() == before
        store.finish(snapshot, tmp_path / "keys")
    return snapshot


def test_a_finished_snapshot_is_there_with_its_keys(store: SnapshotStore, tmp_path: Path) -> None:
    snapshot = make(store, tmp_path, "first")
    assert store.load("first") == snapshot
    assert store.all() == [snapshot]
    assert store.key("first", "controller") == PAIR
    assert (store.machine("first", "primary") / "memory").stat().st_size == 8192
    assert store.disk_bytes("first") >= 8192


def test_a_snapshot_is_never_replaced(store: SnapshotStore, tmp_path: Path) -> None:
    make(store, tmp_path, "first")
    with pytest.raises(UsageError, match="already"), store.making("first", nobody):
        raise AssertionError("it is made again")


@pytest.mark.parametrize("name", ["", ".hidden", "../up", "a/b", "a b", "x" * 65, "-n", "a\n"])
def test_a_name_leads_nowhere_else(store: SnapshotStore, name: str) -> None:
    with pytest.raises(UsageError, match="A snapshot's name"), store.making(name, nobody):
        raise AssertionError("it is made")
    for use in (store.load, store.remove):
        with pytest.raises(UsageError, match="There is no snapshot"):
            use(name)


def test_a_failed_copy_leaves_nothing_that_could_be_used(store: SnapshotStore, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), store.making("first", nobody):
        raise ZeroDivisionError
    assert list(store.path("first").parent.iterdir()) == []
    left = store.path("first").with_name(f"{UNFINISHED}first")
    left.mkdir()
    (left / "memory").write_bytes(b"half")
    with store.making("other", nobody):
        assert store.remove_unfinished() == [left.name]  # and not the one that is being made
    assert list(left.parent.iterdir()) == []
    left.mkdir()
    make(store, tmp_path, "first")


def test_a_snapshot_is_removed_damaged_or_not(store: SnapshotStore, tmp_path: Path) -> None:
    for name in ("whole", "damaged"):
        make(store, tmp_path, name)
    (store.path("damaged") / RECORD).write_text("{")
    with pytest.raises(InfrastructureError, match="cannot be read"):
        store.all()
    for name in ("whole", "damaged"):
        store.remove(name)
    assert store.all() == []
    assert list(store.path("whole").parent.iterdir()) == []


def test_a_snapshot_that_another_command_removes_is_gone(
    store: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(store, tmp_path, "first")

    @contextlib.contextmanager
    def locked_after_another_removed_it(*_: object, **__: object) -> Iterator[None]:
        shutil.rmtree(store.path("first"))
        yield

    monkeypatch.setattr(snapshots, "locked", locked_after_another_removed_it)
    with pytest.raises(UsageError, match="There is no snapshot"):
        store.remove("first")


def test_snapshots_are_listed_while_one_is_removed(
    store: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        make(store, tmp_path, name)
    load = store.load

    def load_while_another_removes(name: str) -> Snapshot:
        shutil.rmtree(store.path("first"), ignore_errors=True)
        return load(name)

    monkeypatch.setattr(store, "load", load_while_another_removes)
    assert [each.name for each in store.all()] == ["second"]
    assert store.disk_bytes("first") == 0
