"""The sweep: finds what nobody looks after any more, in the cloud and in this home, and removes it.

It asks the cloud what carries our tags, and the records what lives. What it would remove is marked in one pass and
removed in the next, if both say the same: an environment that is just coming, or just going, is left alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

from provisioner.clock import now
from provisioner.clouds.cloud import EnvironmentResources
from provisioner.costs.ledger import Entry, Ledger
from provisioner.errors import ProvisionerError
from provisioner.machines.destroy import destroy_machines
from provisioner.machines.locking import environment_lock
from provisioner.machines.logs import keep_logs
from provisioner.machines.stacks import discard_unused_stacks
from provisioner.models import Environment, Record
from provisioner.session import Session
from provisioner.store.locks import is_locked
from provisioner.ttl import LONGEST, TEARDOWN, words

# Between marking and removing: longer than an environment takes from its record to its lease, or from one to none.
PASS_SECONDS = 5.0
# Clocks differ, and schedules may take a minute (EventBridge Scheduler user guide): what is another controller's.
GRACE = timedelta(minutes=10)
REMOVALS_AT_ONCE = 4


class Stray(Record):
    """Something that nobody looks after.

    Args:
        things: what exists of it, in words.
        reason: why it is one.
        recorded: whether this home has a record of it.
        trouble: why it could not be removed; empty: it is gone, or nobody tried.
    """

    environment: str
    cloud: str
    region: str = ""
    things: tuple[str, ...]
    reason: str
    recorded: bool
    trouble: str = ""


def judge(
    found: EnvironmentResources,
    record: Environment | None,
    *,
    attended: bool,
    home: str,
    at: datetime,
    older_than: timedelta,
) -> str | None:
    """Why something may be removed; None: it may not. Pure.

    Args:
        found: what exists under an environment's id.
        record: this home's record of it.
        attended: whether a living process of this home looks after it.
        home: this home's identity.
        at: now.
        older_than: what is younger is left alone.
    """
    created_at = record.created_at if record else found.created_at
    if attended or (created_at and at - created_at < older_than):
        return None
    if record:
        return _judge_record(record, at)
    if found.home == home:
        return "this home made it and has no record of it"
    # Another controller's: its records cannot be seen from here, only what it says in tags.
    if found.leased_until and found.leased_until > at:
        return None
    limit = found.expires_at or (found.created_at + LONGEST if found.created_at else None)
    if limit and limit + GRACE <= at:
        return f"its limit passed {words(at - limit)} ago, and no controller looks after it"
    return None


def _judge_record(record: Environment, at: datetime) -> str | None:
    if record.expires_at <= at:
        return f"its limit passed {words(at - record.expires_at)} ago"
    if record.status == "unverified":
        return "its end was never confirmed"
    if record.status != "ready" or record.attended:
        return "the command that looked after it is gone"
    return None


def find(session: Session, regions: Sequence[str] | None, older_than: timedelta) -> list[Stray]:
    """One pass: what nobody looks after, in the session's cloud.

    Args:
        regions: where to look; None for all.
        older_than: what is younger is left alone.

    Raises:
        ProvisionerError: the cloud could not be asked.
    """
    store = session.environments
    unreadable = store.unreadable()
    for name, error in unreadable.items():
        session.progress.note(f"{name} is left alone: {error.message}")
    # The records first: what is created between the two questions then has none, but a lease.
    readable = store.readable()
    records = {one.id: one for one in readable if one.cloud == session.cloud.name}
    elsewhere = {one.id for one in readable} - records.keys()
    survey = {(one.environment, one.region): one for one in session.cloud.survey(regions)}
    for known in records.values():
        region = known.placement.get("region", "")
        if regions is None or not region or region in regions:
            survey.setdefault((known.id, region), EnvironmentResources(environment=known.id, region=region))
    at = now()
    strays = []
    for (name, region), found in sorted(survey.items()):
        if not name or name in unreadable or name in elsewhere:
            continue
        record = records.get(name)
        attended = is_locked(store.lease(name)) or is_locked(store.lock(name))
        reason = judge(found, record, attended=attended, home=session.home.identity, at=at, older_than=older_than)
        if reason:
            strays.append(
                Stray(
                    environment=name, cloud=session.cloud.name, region=region, things=found.resources, reason=reason,
                    recorded=record is not None,
                )
            )  # fmt: skip
    return strays


def sweep(
    session: Session,
    session_of: Callable[[Environment], Session],
    regions: Sequence[str] | None,
    *,
    older_than: timedelta = timedelta(0),
    dry_run: bool = False,
    shared: Ledger | None = None,
) -> list[Stray]:
    """Marks what nobody looks after, looks again, and removes what is still so.

    Args:
        session_of: a session on the cloud where a record says that its environment is.
        regions: where to look; None for all.
        older_than: what is younger is left alone.
        dry_run: remove nothing.
        shared: the ledger that workers share.

    Returns:
        what was found, each with what kept it from being removed.
    """
    marked = find(session, regions, older_than)
    if dry_run:
        return marked
    swept: list[Stray] = []
    if marked:
        session.progress.note(f"Marked: {', '.join(one.environment for one in marked)}. Looking again in a moment")
        time.sleep(PASS_SECONDS)
        still = {(one.environment, one.region) for one in find(session, regions, older_than)}
        sure = [one for one in marked if (one.environment, one.region) in still]
        recorded = [one for one in sure if one.recorded]
        swept = [_destroy(session, session_of, one) for one in recorded]
        with ThreadPoolExecutor(max_workers=REMOVALS_AT_ONCE) as pool:
            swept += pool.map(lambda one: _clear(session, one, shared), (one for one in sure if not one.recorded))
    _tidy(session, regions)
    if shared:
        _settle_expired(session, shared, regions)
    return swept


def _destroy(session: Session, session_of: Callable[[Environment], Session], stray: Stray) -> Stray:
    """Destroys what this home has a record of, as `destroy` does; its family's teardown is not run."""
    try:
        record = session.environments.find(stray.environment)
        opened = session_of(record)
        with environment_lock(opened, record) as known, opened.shield():
            if session.environments.directory(known.id).exists():
                session.progress.note(f"Removing {known.id}: {stray.reason}")
                keep_logs(opened, known)
                destroy_machines(opened, known)
    except ProvisionerError as error:
        return stray.model_copy(update={"trouble": error.message})
    return stray


def _clear(session: Session, stray: Stray, shared: Ledger | None) -> Stray:
    """Removes what this home knows nothing of."""
    session.progress.note(f"Removing {stray.environment}: {stray.reason}")
    try:
        session.cloud.clear(
            EnvironmentResources(environment=stray.environment, resources=stray.things, region=stray.region)
        )
        for ledger in (session.ledger, shared):
            if ledger:
                ledger.settle_late(stray.environment, now())
    except ProvisionerError as error:
        return stray.model_copy(update={"trouble": error.message})
    return stray


def _tidy(session: Session, regions: Sequence[str] | None) -> None:
    """Removes what is on this controller alone: half-built images, stacks of nothing, holds of what never was."""
    store = session.environments
    for name in session.images.remove_unfinished():
        session.progress.note(f"Removed what was left of building {name}")
    discard_unused_stacks(session)
    known = {one.id for one in store.readable()} | store.unreadable().keys()
    held = [
        entry
        for entry in _held(session, session.ledger, regions)
        if entry.environment not in known and not is_locked(store.lease(entry.environment))
    ]
    if held:
        existing = {one.environment for one in session.cloud.survey(regions)}
        for entry in held:
            if entry.environment not in existing:
                # Its record comes before anything of it is created, and goes after it was settled.
                session.ledger.settle(entry.environment, now(), 0)


def _settle_expired(session: Session, shared: Ledger, regions: Sequence[str] | None) -> None:
    """Settles holds of what has passed its limit and does not exist: whose home it was in cannot be seen from here."""
    expired = [one for one in _held(session, shared, regions) if one.expires_at + TEARDOWN + GRACE <= now()]
    if expired:
        existing = {one.environment for one in session.cloud.survey(regions)}
        for entry in expired:
            if entry.environment not in existing:
                shared.settle_late(entry.environment, now())


def _held(session: Session, ledger: Ledger, regions: Sequence[str] | None) -> list[Entry]:
    """Holds in the session's cloud and in some regions."""
    return [
        entry
        for entry in ledger.entries(unsettled=True)
        if entry.cloud == session.cloud.name and (regions is None or not entry.region or entry.region in regions)
    ]
