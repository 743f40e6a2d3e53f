"""Finds out from the cloud and the ledger what became of a machine that no longer answers, and whose fault it is."""

from __future__ import annotations

import contextlib

from provisioner.batch.steps import Failure, classify, truncate
from provisioner.clock import now
from provisioner.errors import MachineLostError, ProvisionerError
from provisioner.models import Environment, Role
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


def classify_loss(session: Session, environment: Environment, error: MachineLostError, step: str) -> Failure:
    """Classifies a lost connection by what the cloud says of the machines: alone it proves nothing.

    Args:
        step: the name of the step that lost it.
    """
    if environment.expires_at <= now():
        message = "The environment's ttl ended it."
        return Failure(outcome="timed_out" if step == "agent" else "task_failed", message=message)
    try:
        endings = {
            role: session.cloud.termination_reason(environment, role)
            for role, alive in machines_alive(session, environment).items()
            if not alive
        }
    except ProvisionerError as cloud_error:
        message = f"{error.message} The cloud could not be asked: {cloud_error.message}"
        return Failure(outcome="infrastructure_failed", message=truncate(message), retry=True)
    lost = ", ".join(
        f"{role} machine ({ending.message})" if ending.message else f"{role} machine"
        for role, ending in endings.items()
    )
    if step == "agent" and any(ending.from_within for ending in endings.values()):
        # Not the cloud's fault: a fresh machine would give the agent a second chance.
        message = truncate(f"Switched off from within while the agent worked: {lost}.")
        return Failure(outcome="agent_failed", message=message)
    state = f"The cloud confirms the loss: {lost}." if endings else "The cloud says that its machines are running."
    return Failure(outcome="infrastructure_failed", message=truncate(f"{error.message} {state}"), retry=True)
