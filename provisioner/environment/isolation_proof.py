"""Proves the isolation of an environment: by probes in all its machines at once, and by what the cloud sees outside."""

from __future__ import annotations

import secrets
import threading

from provisioner.clouds.guest_files import GUEST
from provisioner.machines.parallel import on_all_machines
from provisioner.models import Environment, ProbeResult, Role
from provisioner.remote import isolation, probes
from provisioner.remote.canary import Canary
from provisioner.remote.ssh import Connection
from provisioner.session import Session


def prove_isolation(
    session: Session, environment: Environment, connections: dict[Role, Connection]
) -> tuple[ProbeResult, ...]:
    """Has all machines probe at once, then asks the cloud what it sees from outside.

    Raises:
        IsolationError: the machines can reach more, or less, than the permission promises.
        MachineLostError: a machine has ended on its own, such as after a spot interruption.
    """
    gateways = session.cloud.gateways(environment)
    program = (GUEST / "probe.py").read_text()
    words: dict[Role, str] = {role: secrets.token_hex(16) for role in environment.machines}
    with Canary(words) as canary:

        def probe(role: Role, _: threading.Event) -> tuple[ProbeResult, ...]:
            asked = probes.questions(environment, role, words[role], canary.ports, gateways)
            return isolation.probe(connections[role], asked, program)

        results_by_role = on_all_machines(environment.machines, probe)
    results = tuple(result for role in environment.machines for result in results_by_role[role])
    probes.require(results, canary.visitors(), session.cloud.isolation_differences(environment))
    return results
