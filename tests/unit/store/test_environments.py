"""Tests the records of environments."""

from __future__ import annotations

import shutil
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from provisioner.base.errors import DamagedRecordError, InfrastructureError, UsageError
from provisioner.base.models import Environment, MachineRecord, MachineSize, TaskSetup
from provisioner.ssh.keys import ed25519_key_pair
from provisioner.store.environments import EnvironmentStore, new_id
from provisioner.store.files import locked, write_atomically
from provisioner.store.home import Home


@pytest.fixture
def store(tmp_path: Path) -> EnvironmentStore:
    home = Home(tmp_path / "home")
    home.make()
    return EnvironmentStore(home)


def environment(identity: str, age_seconds: float = 0) -> Environment:
    size = MachineSize(cpus=1, memory_gib=1, disk_gib=16)
    return Environment(
        id=identity, cloud="local", stack=identity, family="fam", task="main", status="ready",
        created_at=datetime(2026, 1, 2, tzinfo=UTC) - timedelta(seconds=age_seconds),
        expires_at=datetime(2026, 1, 2, 4, tzinfo=UTC),
        setup=TaskSetup(), full_internet=False,
        machines={"primary": MachineRecord(image="family-fam-1", size=size, user="root")},
    )  # fmt: skip


def test_ids_are_readable_and_safe_for_any_name() -> None:
    assert new_id("word_count", "Total!").startswith("word-count-total-")
    assert new_id("../..", "$(id) ${x}").startswith("id-x-")
    assert len(new_id("f" * 300, "t" * 300)) < 64
    assert len({new_id("fam", None) for _ in range(200)}) == 200


@pytest.mark.parametrize("identity", ["../x", "a/b", "", "a b", "a\n", "é"])
def test_a_record_with_a_hostile_id_is_refused(identity: str) -> None:
    with pytest.raises(ValueError, match="a name must consist"):
        environment(identity)


def test_environments_are_listed_oldest_first(store: EnvironmentStore) -> None:
    for each in (environment("fam-main-bbb"), environment("fam-main-aaa", age_seconds=60), environment("other-ccc")):
        store.save(each)
    assert [each.id for each in store.all()] == ["fam-main-aaa", "fam-main-bbb", "other-ccc"]
    assert store.find("bbb").id == "fam-main-bbb"
    assert store.find("other").id == "other-ccc"
    with pytest.raises(UsageError, match="is ambiguous: it matches fam-main-aaa, fam-main-bbb"):
        store.find("fam")
    for name in ("nothing", "", "../fam-main-aaa", "*"):
        with pytest.raises(UsageError, match="no environment"):
            store.find(name)


def test_a_name_means_what_exists_before_what_has_been_destroyed(store: EnvironmentStore) -> None:
    old = environment("fam-main-old")
    for each in (old, environment("fam-main-new")):
        store.save(each)
    store.archive(old)
    assert store.find("fam-main", archived=True).id == "fam-main-new"
    assert store.find("old", archived=True).id == "fam-main-old"
    store.save(environment("fam-main-newer"))
    with pytest.raises(UsageError, match="is ambiguous: it matches fam-main-new, fam-main-newer, fam-main-old"):
        store.find("fam-main", archived=True)


def test_a_damaged_record_is_named_and_not_guessed_at(store: EnvironmentStore) -> None:
    store.save(environment("fam-main-aaa"))
    record = store.directory("fam-main-aaa") / "environment.json"
    for spoilt in ("", "{", '{"id": "fam-main-aaa"}', record.read_text().replace('"fam"', '"fam", "more": 1')):
        record.write_text(spoilt)
        with pytest.raises(InfrastructureError, match="cannot be read"):
            store.all()


def test_a_destroyed_environment_keeps_record_and_logs_alone(store: EnvironmentStore) -> None:
    record = store.save(environment("fam-main-aaa"))
    store.write_keys(record.id, {"controller": ed25519_key_pair()})
    (store.directory(record.id) / "link").symlink_to(store.directory(record.id).parent)
    assert store.key_path(record.id, "controller").stat().st_mode & 0o777 == 0o600
    (store.logs(record.id) / "start.log").write_text("said")
    store.archive(record)
    assert store.all() == []
    assert not store.directory(record.id).exists()
    for name in (record.id, "fam", "aaa"):
        with pytest.raises(UsageError, match="fam-main-aaa has been destroyed"):
            store.find(name)
    with pytest.raises(UsageError, match="There is no environment"):
        store.find("main")
    assert store.find(record.id, archived=True).id == record.id
    assert [path.name for path in store.logs(record.id).iterdir()] == ["start.log"]
    assert not list(store.logs(record.id).parent.rglob("controller*"))


def test_a_kill_while_a_directory_is_removed_loses_no_log(
    store: EnvironmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = store.save(environment("fam-main-aaa"))
    for name in ("agent.log", "start.log"):
        (store.logs(record.id) / name).write_text("said")

    def killed(directory: Path) -> None:
        next(directory.rglob("start.log")).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("provisioner.store.environments.remove_tree", killed)
        with pytest.raises(KeyboardInterrupt):
            store.archive(record)
    [again] = store.all()
    store.archive(again)

    assert store.all() == []
    assert {path.name for path in store.logs(record.id).iterdir()} == {"agent.log", "start.log"}


def test_the_record_that_finds_a_killed_start_goes_last(
    store: EnvironmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = store.save(environment("fam-main-aaa"))
    store.write_keys(record.id, {"controller": ed25519_key_pair()})
    (store.directory(record.id) / "link").symlink_to(store.directory(record.id).parent)
    seen: list[tuple[str, bool]] = []

    def remove(directory: Path) -> None:
        seen.append((directory.name, store.exists(record.id)))
        shutil.rmtree(directory)

    monkeypatch.setattr("provisioner.store.environments.remove_tree", remove)
    store.archive(record)
    assert sorted(seen[:-1]) == [("keys", True), ("logs", True)]
    assert seen[-1] == (record.id, True)
    assert not store.directory(record.id).exists()


def test_a_record_is_read_by_its_exact_id_alone_live_or_archived(store: EnvironmentStore) -> None:
    known = store.save(environment("fam-main-aaa"))
    assert store.record("fam-main-aaa") == known
    assert store.record("fam-main") is None
    store.archive(known)
    assert store.record("fam-main-aaa") == known


def test_a_directory_without_a_record_is_an_orphan(store: EnvironmentStore) -> None:
    store.directory("fam-main-aaa").mkdir()
    assert [path.name for path in store.unrecorded()] == ["fam-main-aaa"]
    with locked(store.lock("fam-main-aaa")):
        assert store.unrecorded() == []


def test_a_record_that_another_provisioner_changed_is_read_again(store: EnvironmentStore) -> None:
    mine = store.save(environment("fam-main-aaa"))
    store.update(mine, status="destroying")
    assert mine.status == "ready"
    assert store.reread(mine).status == "destroying"
    assert store.reread(environment("never-saved")).status == "ready"


@pytest.mark.parametrize("status", ["destroying", "unverified"])
def test_a_change_keeps_what_others_have_recorded(store: EnvironmentStore, status: str) -> None:
    mine = store.save(environment("fam-main-aaa"))
    store.update(mine, status=status)
    changed = store.update(mine, attended=True)
    assert (changed.status, changed.attended) == (status, True)
    assert store.record(mine.id) == changed
    with pytest.raises(UsageError, match="The destruction of fam-main-aaa has begun"):
        store.update(mine, status="ready")
    assert store.record(mine.id) == changed


@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_change_brings_no_removed_record_back(
    store: EnvironmentStore, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    mine = store.save(environment("fam-main-aaa"))

    def write(path: Path, data: str) -> None:
        store.archive_damaged(mine.id)
        write_atomically(path, data)

    if moment == "before":
        store.archive_damaged(mine.id)
    else:
        monkeypatch.setattr("provisioner.store.environments.write_atomically", write)
    with pytest.raises(UsageError, match="fam-main-aaa has been destroyed"):
        store.update(mine, attended=True)
    assert not store.directory(mine.id).exists()


def test_a_change_leaves_a_damaged_record_as_it_is(store: EnvironmentStore) -> None:
    mine = store.save(environment("fam-main-aaa"))
    record = store.directory(mine.id) / "environment.json"
    record.write_text("{")
    with pytest.raises(DamagedRecordError):
        store.update(mine, attended=True)
    assert record.read_text() == "{"


def test_listing_while_others_come_and_go_never_fails(store: EnvironmentStore) -> None:
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            record = store.save(environment(new_id("fam", None)))
            store.forget(record.id)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(200):
            store.all()
    finally:
        over.set()
        thread.join()
