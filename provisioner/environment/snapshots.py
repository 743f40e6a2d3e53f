"""Freezes running environments, and brings up copies that continue from the frozen moment."""

from __future__ import annotations

import contextlib
from datetime import timedelta

from provisioner.base.clock import format_duration, now
from provisioner.base.errors import DamagedRecordError, HostError, UsageError
from provisioner.base.models import Environment
from provisioner.base.progress import best_effort
from provisioner.environment import lifecycle
from provisioner.machines import boot
from provisioner.machines.claims import environment_lock
from provisioner.machines.create import record_environment
from provisioner.machines.launch import Create, create_alone, launched, looked_after
from provisioner.session import Phases, Session
from provisioner.store.environments import new_id
from provisioner.store.files import is_locked
from provisioner.store.snapshots import Snapshot, SnapshotStore

# A copy's timer continues with the time that the frozen machine had left, until the copy gets its own time to live.
LEAST_LEFT = timedelta(minutes=5)


def freeze(
    session: Session, environment: Environment, name: str, phases: Phases | None = None, *, attended: bool = False
) -> Snapshot:
    """Freezes an environment under a name. The environment itself continues.

    Args:
        phases: the phases that are already done.
        attended: whether this process removes the snapshot, or leaves it to the sweep.

    Raises:
        UsageError: it is not up, is about to end, or the name is taken.
        CapacityError: the host's disk has no room.
        InfrastructureError: it failed. The snapshot is removed, and the environment continues.
    """
    store = SnapshotStore(session.home)

    def wait() -> None:
        session.progress.note(f"Waiting for another provisioner that is making the snapshot {name}")

    with store.making(name, wait) as directory, environment_lock(session, environment) as current:
        _require_freezable(session, current)
        needs = session.cloud.snapshot_needs(current)
        frozen_at = now()
        with (phases or Phases(session.progress)).phase("freeze"):
            session.cloud.freeze(current, directory)
        snapshot = Snapshot(name=name, frozen_at=frozen_at, environment=current, needs=needs, attended=attended)
        with contextlib.ExitStack() as undo:
            if attended:  # before there is a snapshot that a sweep would remove
                session.leases.take(_lease(name), store.lease(name), lambda: None)
                undo.callback(session.leases.release, _lease(name))
            store.finish(snapshot, session.environments.key_path(current.id, "controller").parent)
            undo.pop_all()
    return snapshot


def _lease(name: str) -> str:
    """Returns how a process's leases name that of a snapshot: no environment's id has a space."""
    return f"snapshot {name}"


def _require_freezable(session: Session, environment: Environment) -> None:
    if environment.kind != "task":
        raise UsageError(f"{environment.id} cannot be frozen: it builds an image.")
    if environment.status != "ready":
        raise UsageError(f"{environment.id} cannot be frozen: it is not ready, but {environment.status}.")
    left = environment.expires_at - now()
    if left < LEAST_LEFT:
        raise UsageError(
            f"{environment.id} ends too soon to be frozen: at least {format_duration(LEAST_LEFT)} must be left.",
            hint=f"provisioner extend {environment.id} 30m",
        )
    for role in environment.machines:
        if not session.cloud.alive(environment, role):
            raise UsageError(f"{environment.id} cannot be frozen: its {role} machine no longer runs.")


@looked_after
def up(session: Session, name: str) -> Environment:
    """Brings up a copy of a frozen environment, with its own keys and time to live.

    start() does not run again.

    Returns:
        the copy's record, with status `ready`.

    Raises:
        ProvisionerError: it failed; everything that was created has been destroyed.
    """
    return lifecycle.left_to_operator(session, bring_up(session, name))


def bring_up(session: Session, name: str, create: Create = create_alone) -> Environment:
    """Brings up a copy of a frozen environment, as `up` does, that this process looks after.

    Args:
        create: creates the machines of a recorded environment.

    Returns:
        the copy's record, with status `ready`.

    Raises:
        ProvisionerError: it failed; everything that was created has been destroyed.
    """
    store = SnapshotStore(session.home)
    snapshot = store.load(name)
    _require_alike(session, snapshot)
    environment = _copied(session, snapshot)
    phases = Phases(session.progress)

    def record(session: Session, environment: Environment) -> None:
        task_key = store.key(name, "task") if "aux" in environment.machines else None
        with store.held(name):
            record_environment(session, environment, task_key)
            _require_same(store, snapshot)

    with launched(
        session, environment, lifecycle.may_keep, phase=phases.phase("create"), record=record, create=create
    ) as environment:
        with phases.phase("renewal"):
            boot.renew(session, environment)
        with lifecycle.proven(session, environment, phases) as (environment, _):
            pass
        return session.environments.update(environment, status="ready", phases=tuple(phases.finished))


def _require_alike(session: Session, snapshot: Snapshot) -> None:
    """Requires that frozen machines can resume on this host."""
    needs = session.cloud.snapshot_needs(snapshot.environment)
    for name in sorted(snapshot.needs.keys() | needs.keys()):
        then, today = snapshot.needs.get(name, "none"), needs.get(name, "none")
        if then != today:
            raise HostError(
                f"The snapshot {snapshot.name} cannot be copied here: {name} was {then}, and is now {today}.",
                hint="A copy needs what its machines were frozen with. Freeze an environment again.",
            )


def _require_same(store: SnapshotStore, snapshot: Snapshot) -> None:
    """Requires that a snapshot is what it was when it was read; from its copy's record on it cannot be removed."""
    if store.load(snapshot.name) != snapshot:
        raise UsageError(f"The snapshot {snapshot.name} was replaced by another one just now.", hint="Try again.")


def _copied(session: Session, snapshot: Snapshot) -> Environment:
    """Returns the record of a new copy. What was scored and begun in the frozen environment counts in the copy."""
    frozen, created_at = snapshot.environment, now()
    identity = new_id(frozen.family, frozen.task)
    asleep = created_at - snapshot.frozen_at
    return frozen.model_copy(
        update={
            "id": identity,
            "stack": identity,
            "placement": {},
            "status": "creating",
            "shared_ledger": bool(session.database),
            "attended": True,
            "batch": session.spending.batch,
            "label": session.label or frozen.label,
            "created_at": created_at,
            "expires_at": created_at + session.ttl,
            "usd_per_hour": None,
            "endpoints": {},
            "probes": (),
            "phases": (),
            "snapshot": snapshot.name,
            "addresses_of": frozen.addresses_of or frozen.id,
            "started_at": frozen.started_at and frozen.started_at + asleep,
            "agent_at": frozen.agent_at and frozen.agent_at + asleep,
            "outcome": None,
            "breakdown": None,
        }
    )


def remove(session: Session, name: str) -> None:
    """Removes a snapshot.

    Raises:
        UsageError: there is none, or environments run whose disks are layers over it.
    """

    def require_unused() -> None:
        if copies := [each.id for each in session.environments.all() if each.snapshot == name]:
            raise UsageError(
                f"The snapshot {name} cannot be removed: these copies of it still exist: {', '.join(copies)}.",
                hint=f"provisioner destroy {' '.join(copies)}",
            )

    SnapshotStore(session.home).remove(name, require_unused)
    session.leases.release(_lease(name))


def leave(session: Session, name: str) -> None:
    """Leaves an attended snapshot to the sweep, which removes it once no copy of it exists."""
    session.leases.release(_lease(name))


def abandoned(session: Session) -> list[str]:
    """Returns the names of the attended snapshots whose processes have ended, and of which no copies are known."""
    store = SnapshotStore(session.home)
    copied = {environment.snapshot for environment in session.environments.readable()}
    return [name for name in store.attended() if name not in copied and not is_locked(store.lease(name))]


def remove_abandoned(session: Session) -> list[str]:
    """Removes the abandoned snapshots, and returns their names."""
    removed = []
    for name in abandoned(session):
        with (
            best_effort(session.progress, f"Removing the snapshot {name}"),
            # A copy exists or may exist, or another process was quicker.
            contextlib.suppress(UsageError, DamagedRecordError),
        ):
            remove(session, name)
            removed.append(name)
    return removed
