"""Extends an environment's time to live: first the reservation, then the record, then every timer that ends it."""

from __future__ import annotations

from datetime import timedelta

from provisioner.clock import now
from provisioner.clouds.guest_files import GUEST
from provisioner.costs.ledger import Budget, Entry
from provisioner.errors import Interrupted, LivenessLostError, MachineLostError, ProvisionerError, UsageError
from provisioner.machines import launch
from provisioner.machines.connect import connect
from provisioner.machines.locking import environment_lock
from provisioner.models import Environment
from provisioner.printable import last_lines
from provisioner.session import Session
from provisioner.ttl import extended


def extend(session: Session, environment: Environment, by: timedelta) -> Environment:
    """Extends an environment's time to live.

    Args:
        by: how much longer it may live.

    Returns:
        the updated record.

    Raises:
        UsageError: it has ended or its destruction has begun, it would live too long, or its reservation is in a
            database that is not configured.
        BudgetError: the longer time does not fit a budget; nothing has changed.
        MachineLostError: the timer inside a machine could not be moved, so the machine ends at its earlier time.
    """
    with environment_lock(session, environment) as environment:
        if environment.status != "ready" and not environment.endpoints:
            raise UsageError(f"{environment.id} is not up: its status is {environment.status}.")
        if environment.shared_ledger and not session.database:
            raise UsageError(
                f"The reservation of {environment.id} is in a database that workers share.",
                hint="Set PROVISIONER_DATABASE=postgresql://... to that database.",
            )
        expires_at = extended(environment.created_at, environment.expires_at, by, now())
        longer = environment.model_copy(update={"expires_at": expires_at})
        session.ledger.extend(
            environment.id, expires_at, launch.worst_cost(longer), lambda entry: _budgets(session, entry)
        )
        longer = session.environments.update(longer, expires_at=expires_at)
        session.cloud.move_ttl(longer)
        _move_timers(session, longer)
        return longer


def _budgets(session: Session, entry: Entry) -> list[Budget]:
    """Returns the standing budgets of the project that an entry was launched under."""
    return session.spending.model_copy(update={"project": entry.project}).budgets(entry.launched_at)


def _move_timers(session: Session, environment: Environment) -> None:
    program = (GUEST / "ttl.sh").read_text()
    moment = str(int(environment.expires_at.timestamp()))
    for role in environment.machines:
        try:
            with connect(session, environment, role) as connection:
                done = connection.run(["sh", "-c", program, "ttl", moment, "move"], timeout_seconds=60)
            said = last_lines(done.stderr.decode(errors="replace"), 500) if done.exit_code else ""
        except (Interrupted, LivenessLostError):
            raise
        except (ProvisionerError, TimeoutError) as error:
            said = str(error)
        if said:
            raise MachineLostError(
                f"The {role} machine of {environment.id} could not be extended and ends at its earlier time.",
                hint="Everything else is extended. As root in the machine: systemctl stop provisioner-ttl.timer",
                details=said,
            )
