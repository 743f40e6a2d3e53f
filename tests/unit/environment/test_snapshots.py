"""Tests freezing environments, and bringing up copies of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from provisioner.base.clock import now
from provisioner.base.errors import (
    BudgetError,
    HostError,
    InfrastructureError,
    IsolationError,
    MachineLostError,
    ProvisionerError,
    TaskError,
    UsageError,
)
from provisioner.base.models import Environment, ScoreLogEntry
from provisioner.costs.ledger import Spending
from provisioner.environment import lifecycle, operations, snapshots
from provisioner.machines import claims, launch
from provisioner.machines.apply_batcher import ApplyBatcher
from provisioner.session import Session
from provisioner.ssh.keys import ed25519_key_pair
from provisioner.store.environments import RECORD
from provisioner.store.files import is_locked
from provisioner.store.snapshots import Snapshot, SnapshotStore
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import environment, up

HOUR = timedelta(hours=1)


@pytest.fixture
def pair(session: Session) -> Environment:
    """Provides an environment with an aux VM that is up and was scored once."""
    entry = ScoreLogEntry(score=0.5, scored_at=now(), elapsed_seconds=3.0)
    return session.environments.update(up(session, environment(roles=("primary", "aux"))), score_log=(entry,))


@pytest.fixture
def snapshot(session: Session, pair: Environment) -> Snapshot:
    return snapshots.freeze(session, pair, "saved")


def test_a_frozen_environment_resumes(session: Session, pair: Environment, snapshot: Snapshot) -> None:
    assert SnapshotStore(session.home).load("saved") == snapshot
    assert snapshot.environment == pair == session.environments.find("env")


def test_a_copy_has_its_own_keys_and_ttl_and_no_second_start(
    session: Session, cloud: FakeCloud, pair: Environment, snapshot: Snapshot
) -> None:
    copy = snapshots.up(replace(session, ttl=2 * HOUR), "saved")
    assert copy == session.environments.find(copy.id)
    assert (copy.status, copy.attended, copy.snapshot, copy.addresses_of) == ("ready", False, "saved", "env")
    assert [phase.name for phase in copy.phases] == ["create", "renewal", "boot", "isolation"]
    assert copy.expires_at - copy.created_at == 2 * HOUR
    assert (copy.score_log, copy.setup, copy.machines) == (pair.score_log, pair.setup, pair.machines)
    assert copy.started_at is not None
    assert pair.started_at is not None
    assert copy.started_at - pair.started_at == copy.created_at - snapshot.frozen_at
    keys = [session.environments.key(name, "controller").public for name in (pair.id, copy.id)]
    assert keys[0] != keys[1]
    for role in copy.machines:
        machine = cloud.machine(copy, role)
        assert machine.sshd.shown_key_pair == machine.sshd.key_pair  # it was renewed
        assert not machine.sshd.authorize("root", keys[0])
    assert cloud.machine(copy).guest.operations == []
    assert {probe.machine for probe in copy.probes} == {"primary", "aux"}
    variables = [operations.vm_variables(session, each) for each in (pair, copy)]
    assert variables[0] == variables[1]  # the task has them already


def test_a_copy_of_a_copy_keeps_the_addresses_of_the_first(session: Session, snapshot: Snapshot) -> None:
    first = snapshots.up(session, "saved")
    snapshots.freeze(session, first, "again")
    assert snapshots.up(session, "again").addresses_of == "env"


def test_a_copy_survives_the_environment_that_was_frozen(
    session: Session, pair: Environment, snapshot: Snapshot
) -> None:
    lifecycle.destroy(session, pair)
    assert snapshots.up(session, "saved").status == "ready"


def test_the_budget_is_asked_first(session: Session, cloud: FakeCloud, snapshot: Snapshot) -> None:
    cloud.usd = Decimal(3)
    before = cloud.existing()
    with pytest.raises(BudgetError):
        snapshots.up(replace(session, spending=Spending(month=Decimal(10))), "saved")
    assert cloud.existing() == before


def test_a_copy_on_another_host_is_refused_before_creation(
    session: Session, cloud: FakeCloud, snapshot: Snapshot
) -> None:
    cloud.needs = {"QEMU": "8.0"}
    with pytest.raises(HostError, match=r"QEMU was 7\.2, and is now 8\.0"):
        snapshots.up(session, "saved")
    assert [each.id for each in session.environments.all()] == ["env"]


def test_a_copy_is_of_the_snapshot_that_was_read(
    session: Session, cloud: FakeCloud, pair: Environment, snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, reserve = cloud.existing(), claims.reserve

    def reserve_late(session: Session, environment: Environment) -> Environment:
        snapshots.remove(session, "saved")
        snapshots.freeze(session, pair, "saved")
        return reserve(session, environment)

    monkeypatch.setattr(launch, "reserve", reserve_late)
    with pytest.raises(UsageError, match="was replaced by another one"):
        snapshots.up(session, "saved")
    assert cloud.existing() == before
    assert [each.id for each in session.environments.all()] == ["env"]


@pytest.mark.parametrize("fault", ["refuses", "replaced", "isolation"])
def test_nothing_is_left_of_a_copy_that_cannot_be_trusted(
    session: Session, cloud: FakeCloud, snapshot: Snapshot, fault: str
) -> None:
    before = cloud.existing()
    expected: type[ProvisionerError] = TaskError
    if fault == "refuses":
        cloud.refuses_renewal = {"aux"}
    elif fault == "replaced":
        expected = MachineLostError
        cloud.frozen["saved"]["aux"] = (ed25519_key_pair(), cloud.frozen["saved"]["aux"][1])
    else:
        expected = IsolationError
        cloud.faults.differences = ["aux machine: it has another card"]
    with pytest.raises(expected):
        snapshots.up(session, "saved")
    assert cloud.existing() == before
    assert [each.id for each in session.environments.all()] == ["env"]
    assert not session.ledger.entries(unsettled=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"status": "creating"}, "it is not ready, but creating"),
        ({"kind": "builder"}, "it builds an image"),
        ({"expires_at": now() + timedelta(minutes=1)}, "ends too soon"),
    ],
    ids=["not-ready", "builder", "too-late"],
)
def test_an_environment_that_cannot_resume_is_not_frozen(
    session: Session, pair: Environment, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        snapshots.freeze(session, session.environments.update(pair, **changes), "saved")
    assert SnapshotStore(session.home).all() == []


def test_a_machine_that_has_ended_is_not_frozen(session: Session, cloud: FakeCloud, pair: Environment) -> None:
    cloud.end_machine(pair, "aux")
    with pytest.raises(UsageError, match="aux machine no longer runs"):
        snapshots.freeze(session, pair, "saved")


def test_nothing_is_left_of_a_snapshot_that_fails(session: Session, cloud: FakeCloud, pair: Environment) -> None:
    cloud.faults.stuck = True
    with pytest.raises(InfrastructureError):
        snapshots.freeze(session, pair, "saved")
    assert list(session.home.snapshots.iterdir()) == []


def test_a_copy_that_comes_up_in_this_moment_keeps_its_snapshot(
    session: Session, snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[Environment] = []
    remove = SnapshotStore.remove

    def late(store: SnapshotStore, *arguments: Any) -> None:
        copies.append(snapshots.up(session, snapshot.name))
        remove(store, *arguments)

    monkeypatch.setattr(SnapshotStore, "remove", late)
    with pytest.raises(UsageError, match=r"these copies of it still exist"):
        snapshots.remove(session, snapshot.name)
    assert SnapshotStore(session.home).load(snapshot.name) == snapshot
    lifecycle.destroy(session, copies[0])


def test_a_snapshot_stays_as_long_as_copies_need_it(session: Session, snapshot: Snapshot) -> None:
    copy = snapshots.up(session, "saved")
    with pytest.raises(UsageError, match=copy.id):
        snapshots.remove(session, "saved")
    lifecycle.destroy(session, copy)
    snapshots.remove(session, "saved")
    assert SnapshotStore(session.home).all() == []


def test_a_copy_counts_to_its_commands_batch_and_label(session: Session, snapshot: Snapshot) -> None:
    spending = session.spending.model_copy(update={"batch": "inspect-eval"})
    copy = snapshots.up(replace(session, spending=spending, label="eval 1 (epoch 2)"), "saved")
    assert (copy.batch, copy.label) == ("inspect-eval", "eval 1 (epoch 2)")
    [entry] = session.ledger.entries(environment=copy.id)
    assert entry.batch == "inspect-eval"


def test_a_copy_can_belong_to_its_process_and_share_a_stack(session: Session, snapshot: Snapshot) -> None:
    batcher = ApplyBatcher("copies", 1)
    copy = snapshots.bring_up(session, "saved", batcher.create)
    assert (copy.attended, copy.status) == (True, "ready")
    assert copy.stack.startswith("copies-")
    assert is_locked(session.environments.lease(copy.id))
    lifecycle.destroy(session, copy)


def test_many_copies_come_up_at_once(session: Session, snapshot: Snapshot) -> None:
    with ThreadPoolExecutor(4) as pool:
        copies = list(pool.map(lambda _: snapshots.bring_up(session, "saved"), range(4)))
    assert len({copy.id for copy in copies}) == 4
    assert {copy.status for copy in copies} == {"ready"}


def test_an_attended_snapshot_belongs_to_its_process(session: Session, pair: Environment) -> None:
    lease = SnapshotStore(session.home).lease("ours")
    assert snapshots.freeze(session, pair, "ours", attended=True).attended
    assert snapshots.remove_abandoned(session) == []
    snapshots.remove(session, "ours")
    assert not is_locked(lease)
    snapshots.freeze(session, pair, "ours", attended=True)
    snapshots.leave(session, "ours")
    assert snapshots.remove_abandoned(session) == ["ours"]
    assert SnapshotStore(session.home).all() == []


def test_an_abandoned_snapshot_stays_while_copies_need_it(session: Session, pair: Environment) -> None:
    snapshots.freeze(session, pair, "ours", attended=True)
    snapshots.leave(session, "ours")
    copy = snapshots.up(session, "ours")
    assert snapshots.remove_abandoned(session) == []
    lifecycle.destroy(session, copy)
    record = session.environments.directory(pair.id) / RECORD
    kept = record.read_bytes()
    record.write_text("{")
    assert snapshots.remove_abandoned(session) == []
    record.write_bytes(kept)
    damaged = SnapshotStore(session.home).path("damaged")
    damaged.mkdir()
    (damaged / "snapshot.json").write_text("{")
    assert snapshots.remove_abandoned(session) == ["ours"]
    assert damaged.exists()


def test_a_snapshot_that_nobody_attends_is_never_abandoned(session: Session, snapshot: Snapshot) -> None:
    assert snapshots.remove_abandoned(session) == []
    assert SnapshotStore(session.home).load("saved") == snapshot


def test_no_lease_is_left_of_an_attended_snapshot_that_fails(
    session: Session, pair: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(SnapshotStore, "finish", refuse)
        with pytest.raises(OSError, match="no space left"):
            snapshots.freeze(session, pair, "ours", attended=True)
    assert not is_locked(SnapshotStore(session.home).lease("ours"))
    assert list(session.home.snapshots.iterdir()) == []
