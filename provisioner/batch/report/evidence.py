"""Reads what the home has kept of each run: instructions, submission, the agent's output, the log of what failed.

Rows come from a queue that others may be able to write to. So an environment's files are read only if its id is one
that the run's attempts have: a page that is published must not show another batch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provisioner.base.errors import DamagedRecordError
from provisioner.base.models import MachineRecord
from provisioner.base.printable import beginning
from provisioner.batch.results import Row
from provisioner.batch.suite import environment_id
from provisioner.batch.workflow import MAX_ATTEMPTS
from provisioner.environment.operations import SUBMISSION_KEPT
from provisioner.recording import calls, isolation
from provisioner.store.environments import EnvironmentStore
from provisioner.store.files import read_end

# The most that is kept of each text, and of all texts of all runs together. The page shows less.
READ_BYTES = 64 << 10
TOTAL_BYTES = 128 << 20
TEXTS = 5
# How much is kept of each recorded call.
ROW_CHARACTERS = 300
AGENT_LOG = "agent.log"
# Where the reason of a failure may stand, the most telling first.
_LOGS_OF = {
    "task_failed": ("aggregate_scores.log", "score.log", "intermediate_score.log", "start.log"),
    "infrastructure_failed": ("console-primary.log", "terraform.log"),
}


@dataclass(frozen=True)
class Evidence:
    """What was kept of a run. All texts are untrusted, and empty if there is nothing.

    Args:
        submission: what was scored; None if it is not known.
        log_name, log: the end of the log that may say why the run failed.
        machines: sizes by role, in words.
        versions: of the programs that made them, and their accelerator.
        internet: whether the machines reached the whole internet; None if it is not known.
        calls: the end of the recorded calls, a line for each.
        isolation: the compact form of the proof of isolation (recording/isolation.py); empty without one.
        isolation_line: the same in a line.
    """

    instructions: str = ""
    submission: str | None = None
    agent_output: str = ""
    log_name: str = ""
    log: str = ""
    machines: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    internet: bool | None = None
    calls: str = ""
    isolation: dict[str, Any] = field(default_factory=dict)
    isolation_line: str = ""


def gather(store: EnvironmentStore, batch: str, rows: Sequence[Row]) -> dict[str, Evidence]:
    """Returns the evidence of those runs whose last environment this home has, live or archived, by the run's key."""
    limit_bytes = min(READ_BYTES, TOTAL_BYTES // (TEXTS * max(1, len(rows))))
    return {row.key: _evidence(store, row, limit_bytes) for row in rows if is_own(batch, row)}


def is_own(batch: str, row: Row) -> bool:
    """Whether the environment that a row names is one of its run's attempts."""
    attempts = range(1, min(row.attempts, MAX_ATTEMPTS) + 1)
    return row.environment in {environment_id(batch, row.key, row.task, attempt) for attempt in attempts}


def _evidence(store: EnvironmentStore, row: Row, limit_bytes: int) -> Evidence:
    logs = store.logs(row.environment)
    telling = ((name, _end(logs / name, limit_bytes)) for name in _LOGS_OF.get(row.outcome, ()))
    name, log = next(((name, text) for name, text in telling if text.strip()), ("", ""))
    try:
        record = store.record(row.environment)
    except DamagedRecordError:
        record = None
    proof = isolation.find(logs)
    return Evidence(
        instructions=record.setup.instructions[:limit_bytes] if record else "",
        submission=_submission(logs / SUBMISSION_KEPT, limit_bytes),
        agent_output=_end(logs / AGENT_LOG, limit_bytes),
        log_name=name,
        log=log,
        machines={role: _size(record.machines[role]) for role in record.roles} if record else {},
        versions=record.versions if record else {},
        internet=record.full_internet if record else None,
        calls=_calls(logs / calls.CALLS, limit_bytes),
        isolation=proof.compact() if proof else {},
        isolation_line=proof.line() if proof else "",
    )


def _calls(path: Path, limit_bytes: int) -> str:
    """Returns the last recorded calls, in words; what is damaged, or was never recorded, is left out."""
    lines: list[str] = []
    for line in _end(path, limit_bytes).splitlines():
        with contextlib.suppress(ValueError):  # the first one may begin in its middle
            lines.append(beginning(calls.in_words(calls.row_of(line.encode())), ROW_CHARACTERS))
    return "\n".join(lines)[-limit_bytes:]


def _size(machine: MachineRecord) -> str:
    cpus = f"{machine.size.cpus} {'CPU' if machine.size.cpus == 1 else 'CPUs'}"
    return ", ".join(filter(None, (cpus, f"{machine.size.memory_gib:g} GiB", machine.distribution)))


def _end(path: Path, limit_bytes: int) -> str:
    try:
        return read_end(path, limit_bytes).decode(errors="replace")
    except OSError:
        return ""


def _submission(path: Path, limit_bytes: int) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(limit_bytes).decode(errors="replace")
    except OSError:
        return None
