"""What a process claims of an environment: its lock, its lease, and its worst-case cost, which it settles in the end.

The lock keeps two provisioners from changing one environment at once; with a lease, no sweep removes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal

from provisioner.base.clock import TEARDOWN, now
from provisioner.base.errors import ProvisionerError
from provisioner.base.models import Environment
from provisioner.base.progress import SURVIVABLE, best_effort
from provisioner.costs.ledger import Entry, Traffic
from provisioner.costs.prices import Egress, cost_between, worst_hourly
from provisioner.machines.connect import authorize
from provisioner.session import Session
from provisioner.store.environments import refuse_ending
from provisioner.store.files import locked

DESTRUCTION_WAIT_SECONDS = 60.0
GB = 10**9
# By then CloudWatch shows a machine's last five minutes, which come some minutes late.
SHOWN = timedelta(minutes=15)


def creation_lock(
    session: Session, environment: Environment, wait_seconds: float | None = None
) -> contextlib.AbstractContextManager[None]:
    """Keeps other provisioners from changing an environment that has no record yet."""

    def tell() -> None:
        session.progress.note(f"Waiting for another provisioner that works on {environment.id}")

    return locked(session.environments.lock(environment.id), on_wait=tell, wait_seconds=wait_seconds)


@contextlib.contextmanager
def environment_lock(session: Session, environment: Environment) -> Iterator[Environment]:
    """Keeps other provisioners from changing the environment while this one does.

    A destruction takes `destruction_lock` instead.

    Yields:
        the current record, which another provisioner may have changed: to be changed instead of the one given.

    Raises:
        UsageError: the environment has been destroyed, or its destruction has begun.
        DamagedRecordError: the record cannot be read.
    """
    with creation_lock(session, environment):
        session.environments.refuse_destroyed(environment.id)
        current = session.environments.reread(environment)
        refuse_ending(current)
        yield current


@contextlib.contextmanager
def destruction_lock(session: Session, environment: Environment) -> Iterator[Environment]:
    """Locks an environment for its destruction, which may have begun before.

    No missing or damaged record and no unwritable lock file prevents it. A command that works on the environment has a
    minute to end: it may be waiting for a silent machine for hours.

    Yields:
        the current record; the one given if none can be read.
    """
    with contextlib.ExitStack() as stack:
        with best_effort(session.progress, f"Locking {environment.id}"):
            stack.enter_context(creation_lock(session, environment, DESTRUCTION_WAIT_SECONDS))
        yield session.environments.last_known(environment)


def reserve(session: Session, environment: Environment) -> Environment:
    """Takes the lease and reserves the worst-case cost of an environment. Nothing of it exists yet, not even a record.

    Returns:
        the environment with its highest price per hour.

    Raises:
        BudgetError: the cost does not fit a budget.
        UnavailableError: a price is not known.
    """
    sizes = {role: machine.size for role, machine in environment.machines.items()}
    lines = session.cloud.costs(sizes, has_way_out=environment.has_way_out, spot=environment.kind == "task")
    environment = environment.model_copy(update={"worst_usd_per_hour": worst_hourly(lines)})
    if environment.has_way_out and (egress := session.cloud.egress()).gb:
        session.cloud.sent_bytes(session.cloud.region, {})  # what nobody can measure is not launched
        environment = environment.model_copy(update={"egress_gb": egress.gb, "usd_per_gb": egress.usd_per_gb})
        with best_effort(session.progress, "Counting what earlier environments have sent"):
            count_traffic(session)
    entry = Entry(
        environment=environment.id,
        kind=environment.kind,
        cloud=environment.cloud,
        region=session.cloud.region,
        family=environment.family,
        task=environment.task,
        batch=environment.batch,
        project=session.spending.project,
        command=session.spending.command,
        launched_at=environment.created_at,
        expires_at=environment.expires_at,
        reserved_micro_usd=worst_cost(environment),
    )
    session.home.make()
    take_lease(session, environment)
    try:
        session.ledger.reserve(entry, session.spending.budgets(environment.created_at))
    except BaseException as error:
        with best_effort(session.progress, f"Releasing {environment.id}"):
            session.leases.release(environment.id)
            session.environments.forget(environment.id)
        if not isinstance(error, ProvisionerError):  # Ctrl-C may come after the reservation; nothing exists yet
            with best_effort(session.progress, f"Settling the reservation of {environment.id}"):
                session.ledger.settle(environment.id, now(), 0)
        raise
    return environment


def take_lease(session: Session, environment: Environment) -> None:
    """Takes the lease of an environment: this process looks after it from now on."""

    def renew() -> None:
        current = session.environments.reread(environment)
        if current.endpoints:
            with best_effort(session.progress, f"Looking at what {environment.id} has sent"):
                bound_traffic(session, current)
            session.cloud.renew_lease(current)
            authorize(session, current)

    session.leases.take(environment.id, session.environments.lease(environment.id), renew)


def worst_cost(environment: Environment) -> int:
    """Returns an environment's worst-case cost in millionths of a US dollar; zero on a cloud that costs nothing."""
    if not environment.worst_usd_per_hour:
        return 0
    lives_until = environment.expires_at + TEARDOWN
    return _egress(environment) + cost_between(environment.worst_usd_per_hour, environment.created_at, lives_until)


def _egress(environment: Environment) -> int:
    return Egress(gb=environment.egress_gb, usd_per_gb=environment.usd_per_gb).micro_usd


def bound_traffic(session: Session, environment: Environment) -> None:
    """Ends an environment's machines if they have sent more than they may, and records why.

    Raises:
        HostError, InfrastructureError: the cloud does not say how much, or does not end them.
    """
    if not environment.egress_gb or environment.overrun:
        return
    launched = dict.fromkeys(environment.instance_ids, environment.created_at)
    sent_gb = Decimal(sum(session.cloud.sent_bytes(environment.placement["region"], launched).values())) / GB
    if sent_gb <= environment.egress_gb:
        return
    words = (
        f"{environment.id} has sent {sent_gb:.1f} GB, more than the {environment.egress_gb:g} GB of egress_gb, so its "
        "machines were ended. Traffic between them and to the controller counts. If the task needs more, raise "
        "egress_gb in the configuration file, or PROVISIONER_EGRESS_GB."
    )
    session.environments.update(environment, overrun=words)  # first: what loses the machine asks why
    session.cloud.end_machines([environment])
    session.progress.note(words)


def count_traffic(session: Session) -> None:
    """Counts what ended launches have sent, as far as the cloud shows it by now. Until then, their reservation counts.

    Raises:
        HostError, InfrastructureError: the cloud does not say.
    """
    uncounted = session.ledger.uncounted_traffic(session.cloud.name)
    for region in {traffic.region for traffic in uncounted}:
        there = [traffic for traffic in uncounted if traffic.region == region]
        launched = {name: traffic.launched_at for traffic in there for name in traffic.instances}
        sent = session.cloud.sent_bytes(region, launched)
        for traffic in there:
            gb = Decimal(sum(sent[name] for name in traffic.instances)) / GB
            micro, is_all = Egress(gb=gb, usd_per_gb=traffic.usd_per_gb).micro_usd, now() > traffic.ended_at + SHOWN
            if is_all or micro > traffic.counted_micro_usd:
                session.ledger.count_traffic(traffic.environment, micro, is_all=is_all)


def still_runs(session: Session, environment: Environment) -> bool | None:
    """Returns whether any machine still runs and costs money; None if that is not known."""
    if not environment.endpoints:
        return None
    try:
        return any(session.cloud.alive(environment, role) for role in environment.machines)
    except SURVIVABLE:
        return None


def settle(session: Session, environment: Environment, *, ran: bool | None) -> None:
    """Replaces the reservation by the actual cost. To be called once the cloud has confirmed the environment's end.

    Args:
        ran: whether it still ran just before; otherwise its time to live has ended it. If that is not known (None), it
            costs no more than was reserved.
    """
    reserved_until = environment.expires_at + TEARDOWN
    ended_at = min(now(), {True: now(), False: environment.expires_at, None: reserved_until}[ran])
    if ended_at < environment.created_at:  # the clock was set back: nobody knows how long it lived
        ended_at = reserved_until
    rate = environment.worst_usd_per_hour if environment.usd_per_hour is None else environment.usd_per_hour
    actual = cost_between(rate, environment.created_at, ended_at) if rate else 0
    traffic = None
    if environment.egress_gb and environment.instance_ids:
        traffic = Traffic(
            environment=environment.id,
            cloud=environment.cloud,
            region=environment.placement["region"],
            instances=environment.instance_ids,
            launched_at=environment.created_at,
            ended_at=ended_at,
            usd_per_gb=environment.usd_per_gb,
            # A builder, in which no agent works, blocks no budget that the run itself needs.
            counted_micro_usd=_egress(environment) if environment.kind == "task" else 0,
        )
        actual += traffic.counted_micro_usd
    if environment.shared_ledger and not session.database:
        session.progress.note(
            f"The reservation of {environment.id} is in a database that workers share, and PROVISIONER_DATABASE is not "
            "set: a sweep with it settles the reservation after the time to live"
        )
    session.ledger.settle(environment.id, ended_at, actual, traffic)
