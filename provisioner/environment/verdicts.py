"""Decides what caused the loss of a machine: the cloud, the agent, its time to live, or an unknown cause.

Rests on what the cloud or the host says. Nothing that a machine says counts, nor does a broken connection alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from provisioner.clock import now
from provisioner.clouds.findings import TerminationReason
from provisioner.errors import AgentError, InfrastructureError, LivenessLostError, MachineLostError, ProvisionerError
from provisioner.models import Environment, Role
from provisioner.session import Session


@dataclass(frozen=True)
class Loss:
    """Names what caused the loss of a machine.

    Args:
        cause: `cloud` (or the host, or a person that ended the machine there), `agent`, `ttl`, or `unknown`.
        words: what the cloud says; for people.
    """

    cause: Literal["cloud", "agent", "ttl", "unknown"]
    words: str = ""


def attribute_loss(machines: Mapping[Role, TerminationReason | None], *, agent_began: bool, expired: bool) -> Loss:
    """Judges the loss of a connection to an environment's machines. Pure.

    Args:
        machines: what the cloud says of each: None if it runs well, else why it does not.
        agent_began: whether an agent has begun to work in the environment.
        expired: whether its time to live has ended.
    """
    if expired:
        return Loss("ttl", "The environment's ttl ended it.")
    ended = {role: reason for role, reason in machines.items() if reason is not None}
    words = ", ".join(
        f"{role} machine ({reason.message})" if reason.message else f"{role} machine" for role, reason in ended.items()
    )
    if agent_began and (not ended or any(reason.from_within for reason in ended.values())):
        return Loss("agent", words)
    if any(reason.message and reason.from_within is False for reason in ended.values()):
        return Loss("cloud", words)
    return Loss("unknown", words)


def find_cause(session: Session, environment: Environment, *, agent_began: bool) -> Loss:
    """Asks the cloud about an environment's machines, and judges their loss."""
    expired = environment.expires_at <= now()
    try:
        machines = {role: _state(session, environment, role) for role in environment.machines}
    except LivenessLostError:
        raise
    except ProvisionerError as error:
        return Loss("ttl" if expired else "unknown", f"The cloud could not be asked: {error.message}")
    return attribute_loss(machines, agent_began=agent_began, expired=expired)


def primary_runs(session: Session, environment: Environment) -> bool | None:
    """Returns whether the primary machine runs; None if the cloud cannot be asked, which proves nothing."""
    try:
        return session.cloud.alive(environment, "primary")
    except LivenessLostError:
        raise
    except InfrastructureError:
        return None if session.environments.last_known(environment).expires_at > now() else False


def _state(session: Session, environment: Environment, role: Role) -> TerminationReason | None:
    if role not in environment.endpoints or not session.cloud.alive(environment, role):
        return session.cloud.termination_reason(environment, role)
    impairment = session.cloud.impairment(environment, role)
    return TerminationReason(impairment) if impairment else None


@contextlib.contextmanager
def attributing_loss(session: Session, environment: Environment) -> Iterator[None]:
    """Finds the cause when the body loses a machine, and raises the error that names it.

    Raises:
        AgentError: it is the agent's doing.
        MachineLostError: it is not, or that is not known; the message says what the cloud says.
    """
    try:
        yield
    except MachineLostError as error:
        current = session.environments.reread(environment)  # it may have been extended, and an agent have begun
        loss = find_cause(session, current, agent_began=current.agent_at is not None)
        if loss.cause == "agent" and loss.words:
            raise AgentError(
                f"After the agent had begun, a machine was switched off from within: {loss.words}. "
                "Nothing more can be scored.",
                details=error.details,
            ) from error
        if loss.cause == "agent":
            raise AgentError(
                f"The machine cannot be used any more, although the cloud says that it runs. As an agent had begun, "
                f"this counts as the agent's failure: {error.message} Nothing more can be scored.",
                details=error.details,
            ) from error
        says = {"cloud": f"The cloud confirms the loss: {loss.words}.", "ttl": loss.words}.get(loss.cause, loss.words)
        raise MachineLostError(
            f"{error.message} {says}".strip(),
            hint=error.hint,
            details=error.details,
            cloud_words=loss.words if loss.cause == "cloud" else "",
        ) from error
