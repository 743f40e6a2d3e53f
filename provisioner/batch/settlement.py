"""What a run's attempts have reserved and cost, also those of workers that died: settled, waited for, added up."""

from __future__ import annotations

from datetime import timedelta

from provisioner.base import signals
from provisioner.base.clock import TEARDOWN, now
from provisioner.base.errors import Interrupted, ProvisionerError
from provisioner.batch.steps import Costs, describe
from provisioner.clouds.cloud import EnvironmentResources
from provisioner.session import Session

LEDGER_PAUSES = (2.0, 10.0, 30.0)
# How long Terraform may keep creating after its controller has died. Slow stacks took three minutes, and the AWS
# provider gives an instance ten (its documentation, aws_instance, Timeouts).
MAX_CREATION = timedelta(minutes=10)


def costs(session: Session, environments: list[str]) -> Costs:
    """Adds up what a run's environments have cost by the ledger: reserved sums, where they are not settled."""
    problem = ""
    for pause in (*LEDGER_PAUSES, None):
        try:
            for name in environments:
                settle_orphan(session, name, wait=True)
            entries = [entry for name in environments for entry in session.ledger.entries(environment=name)]
            return Costs(at=now(), micro_usd=sum(entry.counted_micro_usd for entry in entries))
        except Interrupted:
            raise
        except ProvisionerError as error:  # no reason to lose the score
            problem = describe(error)
            if pause is not None:
                signals.wait(pause, session.check)
    return Costs(at=now(), trouble=problem)


def settle_orphan(session: Session, name: str, *, wait: bool) -> None:
    """Removes and settles an environment of a dead controller, once its Terraform certainly creates no more.

    Args:
        name: the environment's id.
        wait: whether to wait until then; else it is left for later.
    """
    if session.environments.directory(name).exists():
        return  # its destruction failed, and its end step says so
    for entry in session.ledger.entries(unsettled=True, environment=name):
        # Not longer if the clock was set back.
        seconds = min(MAX_CREATION, MAX_CREATION - (now() - entry.launched_at)).total_seconds()
        if seconds > 0 and not wait:
            continue
        session.progress.phase_started("waiting for what a dead worker may have begun")
        signals.wait(seconds, session.check)
        session.cloud.delete_resources(EnvironmentResources(environment=name, region=entry.region))
        session.ledger.settle_late(name, now())


def others_have_reservations(session: Session, batch: str, environment: str) -> bool:
    """Whether a batch's other environments, that have not expired, have part of the budget reserved.

    Args:
        environment: the id of the one that is no other.
    """
    return any(
        entry.environment != environment and entry.expires_at > now() - TEARDOWN
        for entry in session.ledger.entries(unsettled=True, batch=batch)
    )
