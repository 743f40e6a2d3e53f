"""A process that works on batches: it takes runs from the queue, works on them, and cleans up when it is stopped."""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg

from provisioner.base.config import Settings
from provisioner.base.errors import InfrastructureError, LivenessLostError, ProvisionerError, UsageError
from provisioner.batch.attempt import Attempt
from provisioner.batch.context import BatchContext
from provisioner.batch.live_status import LiveStatus
from provisioner.batch.queue import Engine, Json, QueueClient, RunState, first_line, postgres_url, sqlite_url
from provisioner.batch.records import Batch, Batches, Job, jobs_of
from provisioner.batch.rows import failed_row
from provisioner.batch.steps import Step
from provisioner.batch.suite import Suite
from provisioner.batch.workflow import StepRunner, run_workflow
from provisioner.costs.ledger_postgres import CLIENT_KEEPALIVE, SERVER_KEEPALIVE, set_parameters
from provisioner.environment.allowlist import parse_destination
from provisioner.machines.apply_batcher import ApplyBatcher, host_slots
from provisioner.store.home import Home
from provisioner.version import __version__

CONNECT_TIMEOUT_SECONDS = 10
POLL_SECONDS = 0.5
# How long runs may take to clean up when they are stopped: Terraform is interrupted, and a destroy follows.
CLEANUP_SECONDS = 300.0

CheckJob = Callable[[Job], None]

# A batch's id is a suite's name, a time and a suffix (store.environments.new_id).
_BATCH = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def only_of(batch: Batch) -> CheckJob:
    """Returns a check that accepts the jobs of one batch alone, exactly as its record has them.

    Raises:
        UsageError: by the check, for any other job.
    """
    jobs = jobs_of(batch)

    def check(job: Job) -> None:
        if job != jobs.get(job.run.key):
            raise UsageError(
                f"The queue's job is not the one that {batch.id} queued: another user of the database changed it."
            )

    return check


@dataclass(frozen=True)
class Offer:
    """What a worker offers to the jobs of a shared queue.

    Args:
        families: directories of families, or directories that contain them.
        agents: directories of agents, or directories that contain them.
        env_files: files with tasks' secrets.
        allow: destinations that environments without internet may reach, as HOST:PORT.
    """

    families: tuple[Path, ...]
    agents: tuple[Path, ...] = ()
    env_files: tuple[Path, ...] = ()
    allow: tuple[str, ...] = ()

    def check(self, job: Job) -> None:
        """Checks that a job names only what is offered, and that its names agree with each other.

        Raises:
            UsageError: it names something else; the message says what, and which option would offer it.
        """
        run, suite = job.run, job.suite
        family = Path(run.family)
        _require_consistent(job)
        _require_inside(family, self.families, "family", "--families")
        for agent in suite.agents:
            _require_inside(Path(job.directory) / agent.directory, self.agents, "agent", "--agents")
        if suite.env_file:
            path = Path(job.directory) / suite.env_file
            if _resolved(path) not in [_resolved(offered) for offered in self.env_files]:
                raise UsageError(f"The job's env file {path} is not offered by this worker (--env-file).")
        offered = {parse_destination(text) for text in self.allow}
        if denied := [text for text in suite.allow if parse_destination(text) not in offered]:
            raise UsageError(f"The job's destination {denied[0]} is not offered by this worker (--allow).")


def _require_consistent(job: Job) -> None:
    """Checks that a job's batch id, key and agent agree: environments, tags and results are named after them."""
    run = job.run
    names = [*(agent.name for agent in job.suite.agents), *(entry.name for entry in job.suite.submissions)]
    key = f"{Path(run.family).name}/{run.task}/{run.agent}/{run.repetition}"
    if not _BATCH.fullmatch(job.batch) or run.key != key or names != [run.agent]:
        raise UsageError("The job's names do not agree with each other: another user of the database changed it.")


def _require_inside(path: Path, offered: tuple[Path, ...], kind: str, option: str) -> None:
    """Checks that a path, with all links followed, lies in one of the directories."""
    resolved = _resolved(path)
    if not path.is_absolute() or not any(resolved.is_relative_to(_resolved(directory)) for directory in offered):
        raise UsageError(f"The job's {kind} {path} is outside the directories that this worker offers ({option}).")


def _resolved(path: Path) -> Path:
    """Returns a path with all links followed, or refuses it."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a NUL character
        raise UsageError("A path of the job cannot be followed.") from error


class LivenessLock:
    """The advisory lock that shows other workers that this one is alive.

    Args:
        url: URL of the shared database.
        worker: this worker's name.

    Raises:
        LivenessLostError: the database cannot be reached.
    """

    def __init__(self, url: str, worker: str) -> None:
        self._worker = worker
        try:
            self._connection = psycopg.connect(
                url, autocommit=True, connect_timeout=CONNECT_TIMEOUT_SECONDS, **CLIENT_KEEPALIVE
            )
            set_parameters(self._connection, SERVER_KEEPALIVE)
            self._connection.execute("SELECT pg_advisory_lock(%s)", (_lock_number(worker),))
        except psycopg.Error as error:
            raise _connection_lost(error) from error

    def dead_workers(self, workers: Iterable[str]) -> list[str]:
        """Returns those of the named workers that are certainly dead.

        Raises:
            LivenessLostError: this worker's own connection is lost, so that other workers consider it dead.
        """
        dead = []
        try:
            for worker in set(workers) - {self._worker}:
                row = self._connection.execute("SELECT pg_try_advisory_lock(%s)", (_lock_number(worker),)).fetchone()
                if row and row[0]:
                    self._connection.execute("SELECT pg_advisory_unlock(%s)", (_lock_number(worker),))
                    dead.append(worker)
            # Also if no other worker was asked about: a lost connection must be noticed.
            self._connection.execute("SELECT 1")
        except psycopg.Error as error:
            raise _connection_lost(error) from error
        return dead

    def close(self) -> None:
        """Releases the lock."""
        self._connection.close()


def _lock_number(worker: str) -> int:
    """Returns a signed 64-bit number for a name: Postgres identifies advisory locks by such numbers."""
    return int.from_bytes(hashlib.sha256(worker.encode()).digest()[:8], signed=True)


def _connection_lost(error: Exception) -> LivenessLostError:
    return LivenessLostError(
        f"The database that the workers share cannot be reached: {first_line(error)}",
        hint="Is it up, and is its URL right? Other workers take over this one's runs.",
    )


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
                if message := _end_last(attempts):
                    self.cleanup_errors.append(message)
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
    error = attempts[-1].end().removal_error if attempts else ""
    return f"{attempts[-1].id} is not confirmed to be gone: {error}" if error else ""


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
