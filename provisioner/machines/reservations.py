"""Takes an environment's lease and reserves its worst-case cost before it is created, and settles after its end."""

from __future__ import annotations

from provisioner.best_effort import SURVIVABLE, best_effort
from provisioner.clock import now
from provisioner.costs.ledger import Entry
from provisioner.costs.prices import cost_between, worst_hourly
from provisioner.errors import ProvisionerError
from provisioner.machines.admission import readmit
from provisioner.models import Environment
from provisioner.session import Session
from provisioner.ttl import TEARDOWN


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
    session.home.make()
    take_lease(session, environment)
    try:
        session.ledger.reserve(_entry(session, environment), session.spending.budgets(environment.created_at))
    except BaseException as error:
        with best_effort(session.progress, f"Releasing {environment.id}"):
            session.leases.release(environment.id)
            session.environments.forget(environment.id)
        if not isinstance(error, ProvisionerError):  # Ctrl-C may come after the reservation; nothing exists yet
            with best_effort(session.progress, f"Settling the reservation of {environment.id}"):
                session.ledger.settle(environment.id, now(), 0)
        raise
    return environment


def _entry(session: Session, environment: Environment) -> Entry:
    return Entry(
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


def take_lease(session: Session, environment: Environment) -> None:
    """Takes the lease of an environment: this process looks after it from now on."""
    lease = session.environments.lease(environment.id)
    session.leases.take(environment.id, lease, lambda: _renew(session, environment))


def worst_cost(environment: Environment) -> int:
    """Returns an environment's worst-case cost in millionths of a US dollar; zero on a cloud that costs nothing."""
    if not environment.worst_usd_per_hour:
        return 0
    return cost_between(environment.worst_usd_per_hour, environment.created_at, environment.expires_at + TEARDOWN)


def _renew(session: Session, environment: Environment) -> None:
    current = session.environments.reread(environment)
    if current.endpoints:
        session.cloud.renew_lease(current)
        readmit(session, current)


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
    if environment.shared_ledger and not session.database:
        session.progress.note(
            f"The reservation of {environment.id} is in a database that workers share, and PROVISIONER_DATABASE is not "
            "set: a sweep with it settles the reservation after the time to live"
        )
    session.ledger.settle(environment.id, ended_at, actual)
