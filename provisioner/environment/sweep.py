"""Sweeps: finds orphans, in the cloud and in this home, and removes them.

An orphan is a resource of ours that no command or controller looks after any more. The sweep compares the resources
that carry our tags with the records. It removes only what two passes find, so that an environment that is being
created or destroyed is left alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

from provisioner.base.clock import MAX_TTL, TEARDOWN, elapsed, format_duration, now
from provisioner.base.models import Environment, Record
from provisioner.base.progress import best_effort, describe
from provisioner.clouds.cloud import EnvironmentResources
from provisioner.costs.ledger import Entry, Ledger
from provisioner.environment import snapshots
from provisioner.environment.selection import launches
from provisioner.machines.claims import bound_traffic, count_traffic, destruction_lock
from provisioner.machines.create import discard_unused_stacks
from provisioner.machines.destroy import clear_away
from provisioner.session import Session
from provisioner.store.files import is_locked
from provisioner.store.snapshots import SnapshotStore

# Between marking and removing: longer than an environment is without its lease or its record while it changes.
PASS_SECONDS = 5.0
# For other controllers' resources: clocks differ, and schedules may be a minute late (EventBridge Scheduler guide).
GRACE = timedelta(minutes=10)
REMOVALS_AT_ONCE = 4


class Orphan(Record):
    """An orphan: an environment, or its remains, that no command looks after.

    Args:
        resources: descriptions of its resources.
        reason: why it is an orphan.
        recorded: whether this home has a record of it.
        problem: why it could not be removed; empty if it was removed or not attempted.
    """

    environment: str
    cloud: str
    region: str = ""
    resources: tuple[str, ...]
    reason: str
    recorded: bool
    problem: str = ""


def orphan_reason(
    found: EnvironmentResources,
    record: Environment | None,
    *,
    attended: bool,
    home: str,
    at: datetime,
    older_than: timedelta,
) -> str | None:
    """Returns why an environment's resources may be removed, or None if they may not. Pure.

    Args:
        found: the resources with the environment's id.
        record: this home's record of the environment, if any.
        attended: whether a running process of this home looks after it.
        home: this home's identity.
        at: the current time.
        older_than: anything younger is left alone.
    """
    created_at = record.created_at if record else found.created_at
    if attended or (created_at and elapsed(created_at, at) < older_than):
        return None
    if record:
        if record.expires_at <= at:
            return f"its time to live ended {format_duration(at - record.expires_at)} ago"
        if record.status == "unverified":
            return "the cloud never confirmed its end"
        return "the command that managed it has ended" if record.needs_command else None
    if found.home == home:
        return "this home created it and has no record of it"
    # Another controller created it. Its records cannot be read here, only its tags.
    if found.leased_until and found.leased_until > at:
        return None
    # Nothing is added to a time that others have written: it may be the last one that there is.
    begin, limit = (found.expires_at, timedelta(0)) if found.expires_at else (found.created_at, MAX_TTL)
    if begin and _is_over(begin, at - limit):
        return f"its time to live ended {format_duration(at - limit - begin)} ago, and no controller manages it"
    return None


def find(session: Session, regions: Sequence[str] | None, older_than: timedelta) -> list[Orphan]:
    """Finds orphans in the session's cloud, in one pass.

    Args:
        regions: the regions to search; None for all.
        older_than: anything younger is left alone.

    Raises:
        ProvisionerError: the cloud could not be asked.
    """
    store, cloud = session.environments, session.cloud.name
    unreadable = store.unreadable()
    # When they expire, if the ledger knows that they are in this cloud.
    entries = {name: [entry for entry in launches(session, name) if entry.cloud == cloud] for name in unreadable}
    damaged = {name: max((each.expires_at for each in known), default=None) for name, known in entries.items()}
    for name, error in unreadable.items():
        if not _is_over(damaged[name], now()):
            session.progress.note(f"{name} is not removed: {error.message} `provisioner destroy {name}` removes it.")
    # Records first: an environment that is created before the survey then has no record here, but has a lease.
    readable = store.readable()
    records = {record.id: record for record in readable if record.cloud == cloud}
    in_other_clouds = {record.id for record in readable} - records.keys()
    survey = {(found.environment, found.region): found for found in session.cloud.list_resources(regions)}
    for recorded in records.values():
        region = recorded.placement.get("region", "")
        if regions is None or not region or region in regions:
            survey.setdefault((recorded.id, region), EnvironmentResources(environment=recorded.id, region=region))
    at = now()
    orphans = []
    for (name, region), found in sorted(survey.items()):
        if not name or name in in_other_clouds or (name in damaged and not _is_over(damaged[name], at)):
            continue
        reason = orphan_reason(
            found,
            records.get(name),
            attended=store.is_attended(name),
            home=session.home.identity,
            at=at,
            older_than=older_than,
        )
        if reason:
            place = {"environment": name, "cloud": cloud, "region": region, "resources": found.resources}
            orphans.append(Orphan(**place, reason=reason, recorded=name in records))
    return orphans


def _is_over(expires_at: datetime | None, at: datetime) -> bool:
    return expires_at is not None and expires_at <= at - GRACE


def sweep(
    session: Session,
    session_of: Callable[[Environment], Session],
    regions: Sequence[str] | None,
    *,
    older_than: timedelta = timedelta(0),
    dry_run: bool = False,
    shared: Ledger | None = None,
) -> list[Orphan]:
    """Finds orphans, looks a second time, and removes those that are still orphans.

    Args:
        session_of: opens a session on the cloud that an environment's record names.
        regions: the regions to search; None for all.
        older_than: anything younger is left alone.
        dry_run: removes nothing.
        shared: the ledger that workers share, if any.

    Returns:
        the orphans, each with the reason if it could not be removed.
    """
    session = session.steady()
    marked = find(session, regions, older_than)
    if dry_run:
        for name in snapshots.abandoned(session):
            session.progress.note(f"Would remove the snapshot {name}, whose command has ended")
        return marked
    swept: list[Orphan] = []
    if marked:
        names = ", ".join(orphan.environment for orphan in marked)
        session.progress.note(f"Found {names}; looking again in a moment before removing anything")
        time.sleep(PASS_SECONDS)
        still = {(orphan.environment, orphan.region) for orphan in find(session, regions, older_than)}
        confirmed = [orphan for orphan in marked if (orphan.environment, orphan.region) in still]
        swept = [_destroy(session, session_of, orphan) for orphan in confirmed if orphan.recorded]
        unrecorded = [orphan for orphan in confirmed if not orphan.recorded]
        with ThreadPoolExecutor(max_workers=REMOVALS_AT_ONCE) as pool:
            swept += pool.map(lambda orphan: _clear(session, orphan, shared), unrecorded)
    _tidy(session, regions)
    if shared:
        _settle_expired(session, shared, regions)
    return swept


def _destroy(session: Session, session_of: Callable[[Environment], Session], orphan: Orphan) -> Orphan:
    """Destroys a recorded environment as `destroy` does, but without the family's teardown."""
    try:
        record = session.environments.find(orphan.environment)
        opened = session_of(record)
        with destruction_lock(opened, record) as current, opened.shield():
            if session.environments.directory(current.id).exists():
                session.progress.note(f"Removing {current.id}: {orphan.reason}")
                clear_away(opened, current)
    except Exception as error:  # the others have to go all the same
        return orphan.model_copy(update={"problem": describe(error)})
    return orphan


def _clear(session: Session, orphan: Orphan, shared: Ledger | None) -> Orphan:
    """Removes an environment's resources that this home has no record of."""
    session.progress.note(f"Removing {orphan.environment}: {orphan.reason}")
    try:
        session.cloud.delete_resources(
            EnvironmentResources(environment=orphan.environment, resources=orphan.resources, region=orphan.region)
        )
        for ledger in (session.ledger, shared):
            if ledger:
                ledger.settle_late(orphan.environment, now())
        if session.environments.directory(orphan.environment).exists():  # its record could not be read
            session.environments.archive_damaged(orphan.environment)
    except Exception as error:  # the others have to go all the same
        return orphan.model_copy(update={"problem": describe(error)})
    return orphan


def _tidy(session: Session, regions: Sequence[str] | None) -> None:
    """Removes remains on this controller: unfinished images and snapshots, unused stacks, reservations of nothing."""
    store = session.environments
    for record in store.readable():  # of an environment that `up` left, no other command looks at the traffic
        with best_effort(session.progress, f"Looking at what {record.id} has sent"):
            if record.cloud == session.cloud.name:
                bound_traffic(session, record)
    with best_effort(session.progress, "Counting what earlier environments have sent"):
        count_traffic(session)
    for name in session.images.remove_unfinished():
        session.progress.note(f"Removed the unfinished image {name}")
    for name in SnapshotStore(session.home).remove_unfinished():
        session.progress.note(f"Removed the unfinished snapshot {name}")
    for name in snapshots.remove_abandoned(session):
        session.progress.note(f"Removed the snapshot {name}, whose command has ended")
    discard_unused_stacks(session)
    recorded = {environment.id for environment in store.readable()} | store.unreadable().keys()
    held = [
        entry
        for entry in _held(session, session.ledger, regions)
        if entry.environment not in recorded and not is_locked(store.lease(entry.environment))
    ]
    if held:
        existing = {found.environment for found in session.cloud.list_resources(regions)}
        for entry in held:
            if entry.environment not in existing:
                # A record is written before anything is created and removed after settling, so nothing was created.
                session.ledger.settle(entry.environment, now(), 0)


def _settle_expired(session: Session, shared: Ledger, regions: Sequence[str] | None) -> None:
    """Settles reservations, of any home, whose environments are past their time to live and do not exist."""
    expired = [entry for entry in _held(session, shared, regions) if entry.expires_at <= now() - TEARDOWN - GRACE]
    if expired:
        existing = {found.environment for found in session.cloud.list_resources(regions)}
        for entry in expired:
            if entry.environment not in existing:
                shared.settle_late(entry.environment, now())


def _held(session: Session, ledger: Ledger, regions: Sequence[str] | None) -> list[Entry]:
    """Returns the unsettled entries of the session's cloud, in some regions."""
    return [
        entry
        for entry in ledger.entries(unsettled=True)
        if entry.cloud == session.cloud.name and (regions is None or not entry.region or entry.region in regions)
    ]
