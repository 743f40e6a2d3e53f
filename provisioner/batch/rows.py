"""Turns the queue's states and outputs into rows of results, one for each run that has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from pydantic import ValidationError

from provisioner.base.errors import DamagedRecordError
from provisioner.base.printable import beginning
from provisioner.batch.queue import REFUSED, Json, RunState
from provisioner.batch.records import Batch
from provisioner.batch.results import Outcome, Row
from provisioner.batch.suite import Run, environment_id
from provisioner.batch.workflow import MAX_ATTEMPTS
from provisioner.costs.ledger import Entry, Ledger
from provisioner.store.environments import EnvironmentStore
from provisioner.version import __version__

MESSAGE_CHARACTERS = 500


def collect_rows(
    batch: Batch,
    states: Mapping[str, RunState],
    known: dict[str, Row],
    outputs: Callable[[Sequence[str]], Mapping[str, Json | str]],
    ledger: Ledger,
    cancelled: frozenset[str] | None = None,
) -> list[Row]:
    """Returns one row for each run that has ended, in the suite's order.

    Args:
        states: the states of the batch's runs, by key.
        known: rows that were read before, by key; new ones are added to it.
        outputs: returns the outputs of ended runs, by key.
        ledger: has the costs of runs that ended without a row of their own.
        cancelled: the keys of the runs that the operator cancelled; others that the queue calls cancelled are about
            to be requeued. None: all that the queue calls cancelled are.
    """
    runs = {run.key: run for run in batch.runs}
    ended = [
        key for key, state in states.items() if state.state in ("done", "broken") and key not in known and key in runs
    ]
    answers = outputs(ended)
    known |= {key: _ended_row(runs[key], answers.get(key, REFUSED)) for key in ended}
    stopped = {
        key for key, state in states.items() if state.state == "cancelled" and (cancelled is None or key in cancelled)
    }
    rows = [
        _row_without_attempts(run, "cancelled", "") if run.key in stopped else known[run.key]
        for run in batch.runs
        if run.key in stopped or run.key in known
    ]
    if all(row.attempts for row in rows):
        return rows
    entries = {entry.environment: entry for entry in ledger.entries(batch=batch.id)}
    return [row if row.attempts else _with_costs(row, batch.id, entries) for row in rows]


def failed_row(run: Run, reason: str) -> Row:
    """Returns the row of a run that could not be worked on."""
    return _row_without_attempts(run, "infrastructure_failed", beginning(reason, MESSAGE_CHARACTERS))


def _ended_row(run: Run, output: Json | str) -> Row:
    """Returns the row that the queue has for a run; that of a failure if it has none, or another run's."""
    if isinstance(output, str):
        return failed_row(run, output)
    try:
        row = Row.model_validate(output)
    except ValidationError:
        return failed_row(run, REFUSED)
    same = (row.key, row.task, row.agent, row.repetition) == (run.key, run.task, run.agent, run.repetition)
    return row if same and row.family == run.key.split("/")[0] else failed_row(run, REFUSED)


def unreadable_of(store: EnvironmentStore, batch: Batch) -> dict[str, DamagedRecordError]:
    """Returns the ids of a batch's environments whose records cannot be read, each with the error."""
    unreadable = store.unreadable()
    ids = {identity for run in batch.runs for identity in _ids(batch.id, run)} if unreadable else set()
    return {identity: error for identity, error in unreadable.items() if identity in ids}


def _ids(batch: str, run: Run | Row) -> Iterator[str]:
    """Returns the ids that the environments of a run's attempts have."""
    return (environment_id(batch, run.key, run.task, attempt) for attempt in range(1, MAX_ATTEMPTS + 1))


def _with_costs(row: Row, batch: str, entries: Mapping[str, Entry]) -> Row:
    """Adds to a row without attempts those that the ledger has entries for."""
    attempts = [entries[identity] for identity in _ids(batch, row) if identity in entries]
    if not attempts:
        return row
    changes = {
        "attempts": len(attempts),
        "environment": attempts[-1].environment,
        "cloud": attempts[-1].cloud,
        "region": attempts[-1].region,
        "cost_micro_usd": sum(entry.counted_micro_usd for entry in attempts),
        "started_at": attempts[0].launched_at,
    }
    return row.model_copy(update=changes)


def _row_without_attempts(run: Run, outcome: Outcome, message: str) -> Row:
    return Row(
        key=run.key, family=run.key.split("/")[0], task=run.task, agent=run.agent, repetition=run.repetition,
        outcome=outcome, message=message, attempts=0, version=__version__,
    )  # fmt: skip
