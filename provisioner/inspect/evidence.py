"""What a sample's log keeps of its machines: how they came up and were proven isolated, what they cost, how they ended.

Reads the home alone. Nothing here may keep machines alive: what cannot be read is left out.
"""

from __future__ import annotations

import contextlib

from pydantic import JsonValue

from provisioner.base.models import Environment
from provisioner.costs.prices import MICRO
from provisioner.inspect.sample import Ending, SampleMachines
from provisioner.recording import isolation
from provisioner.session import Session

Facts = dict[str, JsonValue]


def of_beginning(machines: SampleMachines) -> Facts:
    """Returns what is known of machines that are up."""
    environment = machines.environment
    price = environment.usd_per_hour
    return {
        "environment": environment.id,
        "forked_from": environment.addresses_of or None,
        "frozen_as": machines.frozen_as or None,
        "cloud": environment.cloud,
        "settings": [*machines.configuration.given_by],
        "images": {role: machine.image for role, machine in environment.machines.items()},
        "machines": {role: _machine(environment, role) for role in environment.roles},
        "versions": {**environment.versions},
        "phases": {phase.name: phase.seconds for phase in environment.phases},
        "isolation": _isolation(machines.session, environment.id),
        "recorded": environment.recorded,
        "expires_at": environment.expires_at.isoformat(),
        "usd_per_hour": None if price is None else float(price),
        "usd_reserved": _usd(machines.session, environment.id)["usd_reserved"],
    }


def of_failure(machines: SampleMachines, what: str, error: str) -> Facts:
    """Returns what is known of machines that did not come up, or that may still be there.

    Args:
        what: what has failed, as a key.
        error: why, without secrets.
    """
    begun = machines.begun
    facts: Facts = {what: error}
    if begun is None:
        return facts
    with contextlib.suppress(Exception):
        facts["isolation"] = _isolation(machines.session, begun.id)
    return {**facts, **_end(machines.session, begun.id)}


def of_end(machines: SampleMachines, ending: Ending) -> Facts:
    """Returns what is known of machines that are gone."""
    phases: Facts = {phase.name: phase.seconds for phase in ending.phases}
    memory = machines.memory
    seen: Facts = {"memory": [sentence.words for sentence in memory.sentences], "restarts": {**memory.restarts}}
    return {**_end(machines.session, ending.environment), "phases": phases, **seen}


def _machine(environment: Environment, role: str) -> JsonValue:
    machine = environment.machines[role]
    return {
        "name": environment.hostname(role),
        "type": environment.placement.get(role) or next(iter(machine.size.types), None),
        "cpus": machine.size.cpus,
        "memory_gib": machine.size.memory_gib,
        "disk_gib": machine.size.disk_gib,
        "distribution": machine.distribution,
    }


def _isolation(session: Session, identity: str) -> JsonValue:
    """Returns the compact form of the last proof; None if there is none."""
    proof = isolation.find(session.environments.logs(identity))
    return proof.compact() if proof else None


def _end(session: Session, identity: str) -> Facts:
    """Returns what the records say: the hash of the sealed logs, and when the cloud confirmed that all is gone."""
    record: Environment | None = None
    with contextlib.suppress(Exception):
        record = session.environments.record(identity)
    return {
        "environment": identity,
        "gone_at": record.gone_at.isoformat() if record and record.gone_at else None,
        "recording": record.recording if record else "",
        **_usd(session, identity),
    }


def _usd(session: Session, identity: str) -> Facts:
    """Returns what was reserved and spent, by the ledger; None where it does not say."""
    with contextlib.suppress(Exception):
        for entry in session.ledger.entries(environment=identity):
            actual = entry.actual_micro_usd
            return {"usd_reserved": entry.reserved_micro_usd / MICRO, "usd": None if actual is None else actual / MICRO}
    return {"usd_reserved": None, "usd": None}
