"""Says what came of an environment, and decides what caused the loss of a machine.

The cause is the cloud, the agent, its time to live, or unknown.

Rests on what the cloud or the host says. Nothing that a machine says counts, nor does a broken connection alone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from provisioner.base.clock import now
from provisioner.base.errors import (
    AgentError,
    InfrastructureError,
    LivenessLostError,
    MachineLostError,
    ProvisionerError,
)
from provisioner.base.models import Environment, Role, ScoreLogEntry
from provisioner.base.printable import beginning
from provisioner.clouds.cloud import TerminationReason
from provisioner.family.scores import NO_FAILURES
from provisioner.session import Session

# Stands for the console of each machine.
CONSOLES = "console"
# The phases of an environment's life (lifecycle.py and run.py) and of a build (provisioning.py), with the logs of each.
LOGS_OF_PHASES: dict[str, tuple[str, ...]] = {
    "build step": ("shell",),
    "install": ("install",),
    "setup": ("setup",),
    "create": ("terraform",),
    "boot": (CONSOLES, "terraform"),
    "isolation": (CONSOLES,),
    "start": ("start", "settle_home"),
    "first score": ("intermediate_score",),
    "agent": ("agent",),
    "score": ("score", "aggregate_scores", "intermediate_score"),
    "tests": ("pytest",),
    "teardown": ("teardown",),
}
# Of the score log; --json has all of it.
SHOWN_SCORES = 20
SHOWN_CHARACTERS = 1000


def failed_parts(environment: Environment) -> tuple[str, ...]:
    """Returns the names of the logs of what failed; none if nothing did, or if that is not known."""
    if environment.breakdown:
        parts = LOGS_OF_PHASES.get(environment.breakdown.phase, ())
        consoles = [f"{CONSOLES}-{role}" for role in environment.machines]
        return tuple(name for part in parts for name in (consoles if part == CONSOLES else [part]))
    if environment.outcome and environment.outcome.status not in NO_FAILURES:
        return LOGS_OF_PHASES["score"]
    if environment.agent_exit_code:
        return LOGS_OF_PHASES["agent"]
    return ()


def described(environment: Environment) -> list[str]:
    """Returns lines about what came of an environment: intermediate scores, agent, outcome, and what failed."""
    lines = [_score(entry) for entry in environment.score_log[-SHOWN_SCORES:]]
    if len(environment.score_log) > len(lines):
        lines.insert(0, f"{len(environment.score_log)} intermediate scores, of which the last {len(lines)}:")
    if environment.agent_ended_at:
        code = environment.agent_exit_code
        how = (
            "without an exit code: its time ran out, or its machine restarted" if code is None else f"exit code {code}"
        )
        lines.append(f"agent: ended at {environment.agent_ended_at:%H:%M:%S} UTC, {how}")
    if outcome := environment.outcome:
        score = "no score" if outcome.score is None else f"score {outcome.score:g}"
        lines.append(f"outcome: {outcome.status}, {score}, at {outcome.scored_at:%H:%M:%S} UTC")
        lines += [f"  {text}" for text in (outcome.message, *outcome.details.splitlines()) if text]
    if breakdown := environment.breakdown:
        during = f" in the phase {breakdown.phase}" if breakdown.phase else ""
        lines.append(f"failed{during} at {breakdown.at:%H:%M:%S} UTC: {breakdown.message}")
    return lines


def _score(entry: ScoreLogEntry) -> str:
    score = "no score" if entry.score is None else f"{entry.score:g}"
    said = {"message": entry.message, "details": entry.details}
    more = [
        f", {name} {beginning(json.dumps(value, ensure_ascii=False), SHOWN_CHARACTERS)}"
        for name, value in said.items()
        if value
    ]
    return f"scored after {entry.elapsed_seconds:.0f} s: {score}{''.join(more)}"


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
    if overrun := session.environments.last_known(environment).overrun:
        return Loss("agent" if agent_began else "unknown", overrun)
    try:
        machines = {role: _why_not_well(session, environment, role) for role in environment.machines}
    except LivenessLostError:
        raise
    except ProvisionerError as error:
        return Loss("ttl" if expired else "unknown", f"The cloud could not be asked: {error.message}")
    return attribute_loss(machines, agent_began=agent_began, expired=expired)


def primary_runs(session: Session, environment: Environment) -> bool | None:
    """Returns whether the primary machine runs. If the cloud cannot be asked: None, or False after the ttl."""
    try:
        return session.cloud.alive(environment, "primary")
    except LivenessLostError:
        raise
    except InfrastructureError:
        return None if session.environments.last_known(environment).expires_at > now() else False


def _why_not_well(session: Session, environment: Environment, role: Role) -> TerminationReason | None:
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
        if loss.cause == "agent":
            what = current.overrun or (
                f"After the agent had begun, a machine was switched off from within: {loss.words}."
                if loss.words
                else "The machine cannot be used any more, although the cloud says that it runs. As an agent had "
                f"begun, this counts as the agent's failure: {error.message}"
            )
            raise AgentError(f"{what} Nothing more can be scored.", details=error.details) from error
        says = f"The cloud confirms the loss: {loss.words}." if loss.cause == "cloud" else loss.words
        raise MachineLostError(
            f"{error.message} {says}".strip(),
            hint=error.hint,
            details=error.details,
            cloud_words=loss.words if loss.cause == "cloud" else "",
        ) from error
