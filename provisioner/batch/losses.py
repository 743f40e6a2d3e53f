"""Turns the loss of a machine into an attempt's failure: only what the cloud or the host says is retried."""

from __future__ import annotations

import contextlib

from provisioner.base.clock import now
from provisioner.base.errors import MachineLostError, ProvisionerError
from provisioner.base.models import Environment, Role
from provisioner.batch.steps import Failure, classify, truncate
from provisioner.session import Session


def machines_alive(session: Session, environment: Environment) -> dict[Role, bool]:
    """Asks the cloud which of an environment's machines are alive; those without an endpoint are not."""
    endpoints = environment.endpoints
    return {role: role in endpoints and session.cloud.alive(environment, role) for role in environment.machines}


def classify_launch_error(session: Session, environment_id: str, error: Exception) -> Failure:
    """Classifies an error of a launch. A machine that is lost because its ttl has passed means that start() hung."""
    expired = False
    with contextlib.suppress(ProvisionerError):
        expired = any(entry.expires_at <= now() for entry in session.ledger.entries(environment=environment_id))
    if expired and isinstance(error, MachineLostError):
        return Failure(outcome="task_failed", message="start() did not end within the environment's ttl.")
    return classify(error)


def classify_loss(environment: Environment, error: MachineLostError, step: str, *, agent_began: bool) -> Failure:
    """Classifies the loss of a machine for which the agent is not to blame.

    Args:
        environment: its last known record.
        error: says what the cloud says.
        step: the name of the step that lost it.
        agent_began: whether an agent has begun, which must not get a second chance.
    """
    if environment.expires_at <= now():
        message = "The environment's ttl ended it."
        return Failure(outcome="timed_out" if step == "agent" else "task_failed", message=message)
    # Before an agent has begun, no agent gains by a fresh machine.
    retry = bool(error.cloud_words) or not agent_began
    return Failure(outcome="infrastructure_failed", message=truncate(error.message), retry=retry)
