"""Proves the isolation of an environment: by probes in all its machines at once, and by what the cloud sees outside.

Whatever comes of it is kept among the environment's logs (recording/isolation.py).
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from provisioner.base.clock import now
from provisioner.base.errors import IsolationError, MachineLostError, ProvisionerError
from provisioner.base.models import Environment, ProbeResult, Role
from provisioner.base.progress import best_effort, describe
from provisioner.base.redaction import Redactor
from provisioner.clouds.guest_files import SENT
from provisioner.isolation.canary import Canary
from provisioner.isolation.questions import Questions, evaluate, questions, require
from provisioner.machines.connect import on_all_machines
from provisioner.recording.isolation import (
    DETAIL_CHARACTERS,
    MOST_DIFFERENCES,
    PROOF,
    Answer,
    Proof,
    Surface,
    clean,
    differences_of,
)
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from provisioner.store.files import write_atomically

PROBE_SECONDS = 60
# The longest answer that questions.py would accept has about half of this.
ANSWER_LIMIT_BYTES = 1 << 20


def probe_machine(connection: Connection, asked: Questions, program: str) -> tuple[ProbeResult, ...]:
    """Asks one machine, and judges its answers.

    Args:
        connection: root's connection to the machine.
        program: the text of guest/sent/probe.py.

    Returns:
        a result for each probe that it was asked, once for each user.

    Raises:
        IsolationError: the machine did not answer exactly what it was asked.
    """
    try:
        answer = connection.run(
            ["probe.py"],
            program=f"{program}\n\nmain({asked.request()!a})\n",
            timeout_seconds=PROBE_SECONDS,
            limit_bytes=ANSWER_LIMIT_BYTES,
        )
    except (TimeoutError, MachineLostError) as error:
        raise IsolationError(
            f"The isolation of the {asked.role} machine could not be probed: {type(error).__name__}.",
            hint="Nothing of the task was started in it.",
        ) from error
    return evaluate(asked, answer.stdout)


@dataclass
class _Seen:
    """What has been asked and seen so far. Machines answer in threads of their own."""

    began_at: datetime
    asked: dict[Role, Questions] = field(default_factory=dict)
    results: dict[Role, tuple[ProbeResult, ...]] = field(default_factory=dict)
    canary: Sequence[Role] | None = None
    differences: Sequence[str] | None = None
    surface: Mapping[Role, Surface] = field(default_factory=dict)


def prove_isolation(
    session: Session, environment: Environment, connections: dict[Role, Connection]
) -> tuple[ProbeResult, ...]:
    """Runs the probes in all machines at once, asks the cloud what it sees from outside, and keeps the proof.

    Raises:
        IsolationError: the machines can reach more, or less, than the permission promises.
        MachineLostError: a machine has ended on its own, such as after a spot interruption.
        OSError: the proof cannot be kept.
        ValueError: what was seen contradicts the verdict on it, which is a fault of this program.
    """
    seen = _Seen(now())
    program = (SENT / "probe.py").read_text()
    words: dict[Role, str] = {role: secrets.token_hex(16) for role in environment.machines}
    try:
        gateways = list(session.cloud.gateways[environment.full_internet])
        cloud, online = session.cloud, environment.full_internet
        closed = cloud.closed if online else ()
        controllers = () if online else cloud.ways_to_controllers(environment)
        with Canary(words) as canary:

            def probe(role: Role, _: threading.Event) -> None:
                asked = seen.asked[role] = questions(
                    environment, role, words[role], canary.ports, gateways, closed, controllers,
                    is_silent=cloud.is_silent,
                )  # fmt: skip
                seen.results[role] = probe_machine(connections[role], asked, program)

            on_all_machines(environment.machines, probe)
        results = tuple(result for role in environment.machines for result in seen.results[role])
        seen.canary = canary.visitors()
        differences = session.cloud.isolation_differences(environment)
        seen.surface = session.cloud.surface(environment)
        seen.differences = [*differences, *differences_of(seen.surface)]
        require(results, seen.canary, seen.differences)
    except ProvisionerError as error:
        with best_effort(session.progress, f"Keeping what was seen of the isolation of {environment.id}"):
            _keep(session, environment, seen, describe(error))
        raise
    _keep(session, environment, seen)
    return results


def _keep(session: Session, environment: Environment, seen: _Seen, problem: str = "") -> None:
    """Writes the proof among the logs of an environment that exists."""
    # Copies: after a failure, threads of other machines may still add to them.
    asked, results = dict(seen.asked), dict(seen.results)
    redactor = session.redactor
    differences = seen.differences
    if differences is not None:
        differences = tuple(clean(each, redactor) for each in differences[:MOST_DIFFERENCES])
    proof = Proof(
        environment=environment.id,
        full_internet=environment.full_internet,
        allowlist=tuple(f"{allowed.cidr}:{allowed.port}" for allowed in environment.allowed_destinations),
        began_at=seen.began_at,
        ended_at=now(),
        proven=not problem,
        problem=clean(problem, redactor),
        answers={
            role: _answers(asked[role], results.get(role, ()), redactor) for role in environment.roles if role in asked
        },
        canary=None if seen.canary is None else tuple(seen.canary),
        differences=differences,
        surface=dict(seen.surface),
    )
    write_atomically(session.environments.live_logs(environment.id) / PROOF, proof.model_dump_json(indent=1))


def _answers(asked: Questions, results: Sequence[ProbeResult], redactor: Redactor) -> tuple[Answer, ...]:
    """Returns a machine's answers in the order of the questions, without secrets."""
    given = {(result.user, result.probe): result for result in results}
    answers = []
    for user, probes in asked.probes.items():
        for probe in probes:
            result = given.get((user, probe.name))
            reached = result.reached if result else None
            detail = clean(result.detail, redactor, DETAIL_CHARACTERS) if result else ""
            answers.append(Answer(user=user, probe=probe.name, expected=probe.expected, reached=reached, detail=detail))
    return tuple(answers)
