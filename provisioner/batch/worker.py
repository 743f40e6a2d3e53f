"""A process that works on batches: its engine, its runs, and how they come to their ends."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from provisioner.batch.apply_batcher import ApplyBatcher, host_slots
from provisioner.batch.attempts import Attempt
from provisioner.batch.context import BatchContext
from provisioner.batch.engine import Engine, Json, QueueClient, RunState, postgres_url, sqlite_url
from provisioner.batch.live_status import LiveStatus
from provisioner.batch.liveness import LivenessLock
from provisioner.batch.records import Batch, Batches, Job
from provisioner.batch.results import Outcome, Row
from provisioner.batch.steps import Step
from provisioner.batch.suite import Run, Suite
from provisioner.batch.workflow import MAX_ATTEMPTS, StepRunner, run_workflow
from provisioner.config import Settings
from provisioner.costs.ledger import Entry, Ledger
from provisioner.errors import InfrastructureError, ProvisionerError
from provisioner.store.environments import derived_id
from provisioner.store.home import Home
from provisioner.version import __version__

LOOK_SECONDS = 0.5
# How long runs may take to clear away when they are told to stop: the interrupt ladder, and a destroy.
CLEARING_SECONDS = 300.0


def open_client(home: Home, batch: Batch, database: str) -> QueueClient:
    """The queue of a batch."""
    return QueueClient(engine_url(home, batch.id, database))


def engine_url(home: Home, batch: str, database: str) -> str:
    """The database of a batch's engine: its own file, or the one that workers share."""
    return postgres_url(database) if database else sqlite_url(str(Batches(home).directory(batch) / "engine.sqlite"))


class Worker:
    """Works on the runs of a queue until it is closed.

    Args:
        database: that workers share, as a URL; empty: the file of one batch.
        context: of the only batch that is worked on; None: of all in a shared database.

    Attributes:
        troubles: what could not be cleared away when runs were stopped.
    """

    def __init__(
        self, home: Home, settings: Settings, *, database: str = "", context: BatchContext | None = None
    ) -> None:
        self.live_status = LiveStatus()
        self.troubles: list[str] = []
        self._home = home
        self._settings = settings
        self._database = database
        self._contexts = {context.batch: context} if context else {}
        self._mutex = threading.Lock()
        self._apply_batcher = ApplyBatcher("batch", host_slots())
        # The file's lock says that there is one controller; what the last one had begun is this one's.
        self._name = f"{socket.gethostname()}-{secrets.token_hex(4)}" if database else "controller"
        self._liveness = LivenessLock(database, self._name) if database else None
        batch = context.batch if context else ""
        url = engine_url(home, batch, database)
        self._engine = Engine(url, self._name, self._work, batch)
        self.client = QueueClient(url)

    def add(self, batch: Batch) -> None:
        """Queues all runs of a batch."""
        directory = str(Path(batch.suite_file).parent)
        jobs = {
            run.key: Job(batch=batch.id, suite=needed(batch.suite, run), directory=directory, run=run).model_dump(
                mode="json"
            )
            for run in batch.runs
        }
        self.client.add(batch.id, batch.suite.concurrency, jobs)

    def look(self, batches: Sequence[str]) -> dict[str, dict[str, RunState]]:
        """How far batches have come. Tells runs to stop that were cancelled, and takes over from dead workers.

        Raises:
            InfrastructureError: the database cannot be asked.
        """
        states = {batch: self.client.states(batch) for batch in batches}
        for batch, found in states.items():
            for one in found.values():
                if one.state == "cancelled":
                    self.live_status.stop(f"{batch}/{one.key}")
        if self._liveness and (dead := self._liveness.dead_workers(self.client.executors())):
            self._engine.recover(dead)
        return states

    def mend_handing_back(self, batch: str, states: Mapping[str, RunState], cancelled: frozenset[str]) -> None:
        """What `mend_handing_back` does, where workers share a queue."""
        if self._liveness:
            mend_handing_back(self.client, self._liveness.dead_workers, batch, states, cancelled)

    def stop(self, hand_back: bool = False) -> None:
        """Stops all runs that are worked on here and waits until they have cleared away.

        Args:
            hand_back: queue them again, for other workers.
        """
        mine: dict[str, list[str]] = {}
        # Cancelled first: a step that ends now is not the beginning of the next one.
        with contextlib.suppress(InfrastructureError):  # a database that is lost hears of it no more
            for batch in {running.key.partition("/")[0] for running in self.live_status.active_runs()}:
                states = self.client.states(batch).values()
                # What was cancelled, or taken over by another worker, is not ours to hand back.
                mine[batch] = [one.key for one in states if one.state == "running" and one.executor == self._name]
                self.client.cancel(batch, mine[batch])
        self.live_status.stop_all()
        deadline = time.monotonic() + CLEARING_SECONDS
        while self.live_status.active_runs() and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        if hand_back:
            with contextlib.suppress(InfrastructureError):
                for batch, keys in mine.items():
                    self.client.resume(batch, keys)

    def close(self) -> None:
        """Ends engine and connections."""
        self._engine.close()
        self.client.close()
        if self._liveness:
            self._liveness.close()

    def _work(self, given: Json, do: StepRunner[Step]) -> Json:
        job = Job.model_validate(given)
        attempts: list[Attempt] = []
        with self.live_status.track(f"{job.batch}/{job.run.key}") as running:

            def attempt(number: int, shortages: int) -> Attempt:
                made = context.attempt(
                    job.suite, job.run, number, shortages, self.live_status, running, self._apply_batcher
                )
                attempts.append(made)
                return made

            try:
                context = self._context_of(job)
                row = run_workflow(job.run, job.suite.retries, attempt, do, __version__)
            except ProvisionerError as error:
                row = broken(job.run, f"{error.message} {_cleared(attempts)}".strip())
            except BaseException:
                # Cancelled, within a step or between two: no further step is done, and nothing may stay.
                if trouble := _cleared(attempts):
                    self.troubles.append(trouble)
                raise
            return row.model_dump(mode="json")

    def _context_of(self, job: Job) -> BatchContext:
        with self._mutex:
            context = self._contexts.get(job.batch)
            if context is None:
                context = BatchContext(
                    self._home, self._settings, job.suite, Path(job.directory), job.batch, database=self._database
                )
                self._contexts[job.batch] = context
            return context


def _cleared(attempts: Sequence[Attempt]) -> str:
    """Ends the last attempt, whatever became of it; what would not go."""
    trouble = attempts[-1].end().trouble if attempts else ""
    return f"{attempts[-1].id} is not confirmed to be gone: {trouble}" if trouble else ""


def mend_handing_back(
    client: QueueClient,
    dead_of: Callable[[Collection[str]], Collection[str]],
    batch: str,
    states: Mapping[str, RunState],
    cancelled: frozenset[str],
) -> None:
    """Queues again what a worker was handing back when it died, and cancels again what was cancelled meanwhile.

    Args:
        dead_of: those of some workers that surely are dead.
        states: how far the batch's runs had come a moment ago, by key.
        cancelled: the keys of those that somebody cancelled.
    """
    client.cancel(
        batch, [key for key, one in states.items() if key in cancelled and one.state in ("queued", "running")]
    )
    lost = {key: one.executor for key, one in states.items() if one.state == "cancelled" and key not in cancelled}
    if lost and (dead := dead_of(set(lost.values()))):
        # Read again: until it ended, it may have handed them back itself, and others have taken them.
        found = client.states(batch)
        client.resume(batch, [key for key in lost if found[key].state == "cancelled" and found[key].executor in dead])


def needed(suite: Suite, run: Run) -> Suite:
    """The suite as far as one run needs it: each job keeps its own. Pure."""
    return suite.model_copy(
        update={
            "families": suite.families[:1],
            "agents": tuple(one for one in suite.agents if one.name == run.agent),
            "submissions": tuple(one for one in suite.submissions if one.name == run.agent),
        }
    )


def rows_of(
    batch: Batch,
    states: Mapping[str, RunState],
    known: dict[str, Row],
    outputs: Callable[[Sequence[str]], Mapping[str, Json | str]],
    ledger: Ledger,
    cancelled: frozenset[str] | None = None,
) -> list[Row]:
    """One row for each run that has ended, in the suite's order.

    Args:
        known: rows that were read before; those that are new are added.
        outputs: what ended runs came to, by key.
        cancelled: the keys of those that somebody cancelled; others are being handed back. None: all are.
        ledger: tells what runs without a row of their own have cost.
    """
    by_key = {run.key: run for run in batch.runs}
    ended = [key for key, one in states.items() if one.state in ("done", "broken") and key not in known]
    for key, output in outputs(ended).items():
        known[key] = broken(by_key[key], str(output)) if isinstance(output, str) else Row.model_validate(output)
    stopped = {
        key for key, one in states.items() if one.state == "cancelled" and (cancelled is None or key in cancelled)
    }
    rows = [
        _row(run, "cancelled", "") if run.key in stopped else known[run.key]
        for run in batch.runs
        if run.key in stopped or run.key in known
    ]
    if all(row.attempts for row in rows):
        return rows
    entries = {entry.environment: entry for entry in ledger.entries(batch=batch.id)}
    return [row if row.attempts else _paid(row, batch.id, entries) for row in rows]


def _paid(row: Row, batch: str, entries: Mapping[str, Entry]) -> Row:
    """A row without attempts, with those that the ledger knows. Pure."""
    names = (derived_id(row.family, row.task, f"{batch}/{row.key}/{number}") for number in range(1, MAX_ATTEMPTS + 1))
    found = [entries[name] for name in names if name in entries]
    if not found:
        return row
    changes = {
        "attempts": len(found),
        "environment": found[-1].environment,
        "cloud": found[-1].cloud,
        "region": found[-1].region,
        "cost_micro_usd": sum(entry.counted_micro_usd for entry in found),
        "started_at": found[0].launched_at,
    }
    return row.model_copy(update=changes)


def broken(run: Run, why: str) -> Row:
    """The row of a run that could not be worked on."""
    return _row(run, "infrastructure_failed", why[:500])


def _row(run: Run, outcome: Outcome, message: str) -> Row:
    return Row.model_validate(
        {
            "key": run.key, "family": run.key.split("/")[0], "task": run.task, "agent": run.agent,
            "repetition": run.repetition, "outcome": outcome, "message": message, "attempts": 0,
            "version": __version__,
        }
    )  # fmt: skip
