"""Has one machine probe its isolation, with a program that is sent with the questions and runs from memory.

Fails closed: whatever is no exact answer counts as open. The machine's word can make the verdict worse, never better;
what a machine can fake is checked from outside as well (clouds/cloud.py, `isolation_differences`).
"""

from __future__ import annotations

from provisioner.errors import IsolationError, MachineLostError
from provisioner.isolation.probes import Questions, evaluate
from provisioner.models import ProbeResult
from provisioner.ssh.connection import Connection

PROBE_SECONDS = 60
# The longest answer that probes.py would accept has about half of this.
ANSWER_LIMIT_BYTES = 1 << 20


def probe(connection: Connection, asked: Questions, program: str) -> tuple[ProbeResult, ...]:
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
