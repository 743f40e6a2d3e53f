"""A process that works on batches: it takes runs from the queue, works on them, and cleans up when it is stopped."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from provisioner.base.config import Settings
from provisioner.base.errors import InfrastructureError, ProvisionerError
from provisioner.batch.attempts import Attempt
from provisioner.batch.context import BatchContext
from provisioner.batch.engine import Engine, Json, QueueClient, RunState, postgres_url, sqlite_url
from provisioner.batch.live_status import LiveStatus
from provisioner.batch.liveness import LivenessLock
from provisioner.batch.offers import CheckJob
from provisioner.batch.records import Batch, Batches, Job, jobs_of
from provisioner.batch.rows import failed_row
from provisioner.batch.steps import Step
from provisioner.batch.suite import Suite
from provisioner.batch.workflow import StepRunner, run_workflow
from provisioner.machines.apply_batcher import ApplyBatcher, host_slots
from provisioner.store.home import Home
from provisioner.version import __version__

POLL_SECONDS = 0.5
# How long runs may take to clean up when they are stopped: Terraform is interrupted, and a destroy follows.
CLEANUP_SECONDS = 300.0


def open_client(home: Home, batch: Batch, database: str) -> QueueClient:
    """Opens a batch's queue: in the shared database, or in the batch's own file if no database is named."""
    return QueueClient(_engine_url(home, batch.id, database))


def _engine_url(home: Home, batch: str, database: str) -> str:
    return postgres_url(database) if database else sqlite_url(str(Batches(home).directory(batch) / "engine.sqlite"))


class Worker:
    """Works on the runs of a queue until it is closed.

    Args:
        check_job: raises an error for a job that this worker must not work on.
        database: URL of the database that workers share; empty: the file of one batch.
        context: of the only batch to work on; None: all batches in a shared database.

    Attributes:
        live_status: the runs that it is working on.
        client: its access to the queue.
        cleanup_errors: messages about what could not be removed when runs were stopped.

    Raises:
        InfrastructureError: the database cannot be used.
    """

    def __init__(
        self,
        home: Home,
        settings: Settings,
        check_job: CheckJob,
        *,
        database: str = "",
        context: BatchContext | None = None,
    ) -> None:
        self.live_status = LiveStatus()
        self.cleanup_errors: list[str] = []
        self._home = home
        self._settings = settings
        self._database = database
        self._check_job = check_job
        self._context = context
        self._contexts: dict[tuple[str, str, Suite], BatchContext] = {}
        self._mutex = threading.Lock()
        self._apply_batcher = ApplyBatcher("batch", host_slots())
        # A batch with a queue of its own has one controller at a time, by the file's lock. All have the same name, so
        # that each takes over the runs of the last.
        self._name = f"{socket.gethostname()}-{secrets.token_hex(4)}" if database else "controller"
        self._liveness_lock = LivenessLock(database, self._name) if database else None
        batch = context.batch if context else ""
        url = _engine_url(home, batch, database)
        self._engine = Engine(url, self._name, self._work, batch)
        self.client = QueueClient(url)

    def add(self, batch: Batch) -> None:
        """Queues all runs of a batch that have not been queued before."""
        jobs = {key: job.model_dump(mode="json") for key, job in jobs_of(batch).items()}
        self.client.add(batch.id, batch.suite.concurrency, jobs)

    def poll(self, batches: Sequence[str]) -> dict[str, dict[str, RunState]]:
        """Reads the states of batches' runs, stops those that were cancelled, and takes over from dead workers.

        Args:
            batches: the batches' ids.

        Returns:
            the states, by batch and by the run's key.

        Raises:
            InfrastructureError: the database cannot be used.
        """
        states = {batch: self.client.states(batch) for batch in batches}
        for batch, states_by_key in states.items():
            for state in states_by_key.values():
                if state.state == "cancelled":
                    self.live_status.stop(f"{batch}/{state.key}")
        if self._liveness_lock and (dead := self._liveness_lock.dead_workers(self.client.executors())):
            self._engine.recover(dead)
        return states

    def reconcile_cancellations(self, batch: str, states: Mapping[str, RunState], cancelled: frozenset[str]) -> None:
        """Makes the queue agree with what the operator cancelled, as the function of this name does."""
        # A queue that is not shared has no other worker that could have died.
        find_dead = self._liveness_lock.dead_workers if self._liveness_lock else lambda _: ()
        reconcile_cancellations(self.client, find_dead, batch, states, cancelled)

    def stop(self, requeue: bool = False) -> None:
        """Stops all runs that this process is working on, and waits until they have cleaned up.

        Args:
            requeue: whether to queue them again, for other workers: not those that were cancelled again or taken
                while they cleaned up.
        """
        stopped: dict[str, list[RunState]] = {}
        # Cancelled first, so that no run begins another step when its current step ends.
        with contextlib.suppress(InfrastructureError):  # a lost database cannot be told
            for batch in {active_run.key.partition("/")[0] for active_run in self.live_status.active_runs()}:
                states = self.client.states(batch).values()
                # Runs that were cancelled, or taken over by another worker, are not this one's to requeue.
                keys = [state.key for state in states if state.state == "running" and state.executor == self._name]
                self.client.cancel(batch, keys)
                stopped[batch] = self._cancelled_here(batch, keys)
        self.live_status.stop_all()
        deadline = time.monotonic() + CLEANUP_SECONDS
        while self.live_status.active_runs() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if requeue:
            with contextlib.suppress(InfrastructureError):
                for batch, noted in stopped.items():
                    # The operator may have cancelled a run meanwhile. Or another worker took this one for dead and has
                    # the run. Either changes the run's state or the time at which it was set.
                    current = self._cancelled_here(batch, [state.key for state in noted])
                    self.client.resume(batch, [state.key for state in current if state in noted])

    def _cancelled_here(self, batch: str, keys: Collection[str]) -> list[RunState]:
        """Returns the states of those of the runs that are cancelled and that this worker worked on last."""
        states = self.client.states(batch).values()
        return [
            state
            for state in states
            if state.key in keys and state.state == "cancelled" and state.executor == self._name
        ]

    def close(self) -> None:
        """Ends the engine and closes the connections."""
        self._engine.close()
        self.client.close()
        if self._liveness_lock:
            self._liveness_lock.close()

    def _work(self, data: Json, run_step: StepRunner[Step]) -> Json:
        """Works on one run, from its job to its row."""
        job = Job.model_validate(data)
        attempts: list[Attempt] = []
        with self.live_status.track(f"{job.batch}/{job.run.key}") as active_run:

            def new_attempt(number: int, shortages: int) -> Attempt:
                attempt = context.new_attempt(
                    job.suite, job.run, number, shortages, self.live_status, active_run, self._apply_batcher
                )
                attempts.append(attempt)
                return attempt

            try:
                self._check_job(job)
                context = self._context or self._context_for(job)
                row = run_workflow(job.run, job.suite.retries, new_attempt, run_step, __version__)
            except ProvisionerError as error:
                row = failed_row(job.run, f"{error.message} {_end_last(attempts)}".strip())
            except BaseException:
                # Cancelled, within a step or between two: no further step will run, and nothing may remain.
                if problem := _end_last(attempts):
                    self.cleanup_errors.append(problem)
                raise
            return row.model_dump(mode="json")

    def _context_for(self, job: Job) -> BatchContext:
        # By all that a context is made from: a job never runs in the context of another that only claims its batch.
        shared = job.suite.model_copy(update={"families": (), "agents": (), "submissions": ()})
        key = (job.batch, job.directory, shared)
        with self._mutex:
            if key not in self._contexts:
                self._contexts[key] = BatchContext(
                    self._home, self._settings, job.suite, Path(job.directory), job.batch, database=self._database
                )
            return self._contexts[key]


def _end_last(attempts: Sequence[Attempt]) -> str:
    """Ends the last attempt, if there is one. Returns a message about what could not be removed, or an empty text."""
    problem = attempts[-1].end().trouble if attempts else ""
    return f"{attempts[-1].id} is not confirmed to be gone: {problem}" if problem else ""


def reconcile_cancellations(
    client: QueueClient,
    find_dead: Callable[[Collection[str]], Collection[str]],
    batch: str,
    states: Mapping[str, RunState],
    cancelled: frozenset[str],
) -> None:
    """Makes a queue agree with what the operator cancelled, where runs came into it later or a worker was stopped.

    Runs that the operator cancelled before they were queued are cancelled here. A worker that is stopped cancels its
    runs in the queue, and requeues them once they have cleaned up. If it dies in between, they are requeued here. Runs
    that the operator cancelled meanwhile, and that it requeued, are cancelled again.

    Args:
        find_dead: returns those of the named workers that are certainly dead.
        batch: the batch's id.
        states: the states of the batch's runs a moment ago, by key.
        cancelled: the keys of the runs that the operator cancelled.
    """
    client.cancel(
        batch, [key for key, state in states.items() if key in cancelled and state.state in ("queued", "running")]
    )
    lost = {key: state.executor for key, state in states.items() if state.state == "cancelled" and key not in cancelled}
    if lost and (dead := find_dead(set(lost.values()))):
        # Read again: before it ended, the worker may have requeued them, and others may have taken them.
        current = client.states(batch)
        client.resume(
            batch,
            [
                key
                for key in lost
                if key in current and current[key].state == "cancelled" and current[key].executor in dead
            ],
        )
