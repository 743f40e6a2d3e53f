"""The durable engine: a queue of runs whose finished steps survive any crash. The only importer of dbos."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

from dbos import DBOS, DBOSClient, DBOSConfig, DBOSPortableJSONSerializer
from dbos import error as dbos_error
from sqlalchemy.exc import SQLAlchemyError

from provisioner.batch.steps import Step
from provisioner.batch.workflow import StepRunner
from provisioner.errors import InfrastructureError, Interrupted
from provisioner.models import Record

# Runs that were begun are gone on with by engines of the same version alone: change it with the steps.
VERSION = "1"
NAME = "provisioner"
WORKFLOW = "run"
# Threads are made when they are needed; more runs than this are never worked on by one process.
THREADS = 1100
POLLING_SECONDS = 0.5

State = Literal["queued", "running", "done", "broken", "cancelled"]
_STATES: dict[str, State] = {
    "ENQUEUED": "queued",
    "DELAYED": "queued",
    "PENDING": "running",
    "SUCCESS": "done",
    "CANCELLED": "cancelled",
    "ERROR": "broken",
    "MAX_RECOVERY_ATTEMPTS_EXCEEDED": "broken",
}
_FINAL = ("done", "broken")

S = TypeVar("S", bound=Step)
Json = dict[str, Any]


class RunState(Record):
    """How far a run has come.

    Args:
        key: the run's.
        executor: who works on it, or did.
        started_at: when it was last taken from the queue.
    """

    key: str
    state: State
    executor: str = ""
    started_at: datetime | None = None


def sqlite_url(path: str) -> str:
    """The URL of an engine in a file."""
    return f"sqlite:///{path}"


def postgres_url(url: str) -> str:
    """The URL as SQLAlchemy wants it: with the driver that we bring."""
    scheme, colon, rest = url.partition("://")
    return f"postgresql+psycopg{colon}{rest}" if scheme in ("postgres", "postgresql") else url


class QueueClient:
    """The queue as any process may see and change it, whether it works on it or not.

    Args:
        url: of a database in which an engine has worked before.
    """

    def __init__(self, url: str) -> None:
        quiet()
        try:
            self._client = DBOSClient(
                system_database_url=url,
                serializer=DBOSPortableJSONSerializer(),
                application_name=NAME,
                retry_connection_errors=False,
            )
        except Exception as error:  # dbos raises what it likes
            raise _unusable(error) from error

    def close(self) -> None:
        """Ends its connections."""
        self._client.destroy()

    def add(self, batch: str, concurrency: int, jobs: Mapping[str, Json]) -> None:
        """Queues runs. Those that are queued already stay as they are.

        Args:
            concurrency: how many of the batch may run at once, whoever works on them.
            jobs: by the runs' keys.
        """
        with _asking():
            self._client.register_queue(
                batch, global_concurrency=concurrency, polling_interval_sec=POLLING_SECONDS, on_conflict="always_update"
            )
            for key, job in jobs.items():
                self._client.enqueue(
                    {
                        "queue_name": batch,
                        "workflow_name": WORKFLOW,
                        "workflow_id": f"{batch}/{key}",
                        "app_version": VERSION,
                    },
                    job,
                )

    def states(self, batch: str) -> dict[str, RunState]:
        """How far each run of a batch has come, by key.

        Raises:
            InfrastructureError: the database cannot be asked.
        """
        prefix = f"{batch}/"
        found = self._list(workflow_id_prefix=prefix, load_input=False, load_output=False)
        return {
            one.workflow_id.removeprefix(prefix): RunState(
                key=one.workflow_id.removeprefix(prefix),
                state=_STATES[one.status],
                executor=one.executor_id or "",
                started_at=datetime.fromtimestamp(one.dequeued_at / 1000, UTC) if one.dequeued_at else None,
            )
            for one in found
        }

    def outputs(self, batch: str, keys: Sequence[str]) -> dict[str, Json | str]:
        """What ended runs came to, by key; a text where their work itself broke."""
        if not keys:
            return {}
        found = self._list(workflow_ids=[f"{batch}/{key}" for key in keys], load_input=False)
        return {
            one.workflow_id.removeprefix(f"{batch}/"): str(one.error) if one.output is None else one.output
            for one in found
        }

    def cancel(self, batch: str, keys: Sequence[str]) -> None:
        """Cancels runs that have not ended; whoever works on one is told by its state."""
        if keys:
            with _asking():
                self._client.cancel_workflows([f"{batch}/{key}" for key in keys])

    def resume(self, batch: str, keys: Sequence[str]) -> None:
        """Queues cancelled runs again: they go on behind their last finished step."""
        if keys:
            with _asking():
                self._client.resume_workflows([f"{batch}/{key}" for key in keys], queue_name=batch)

    def executors(self) -> set[str]:
        """Who works on any run, as far as is known."""
        found = self._list(status="PENDING", load_input=False, load_output=False)
        return {one.executor_id for one in found if one.executor_id}

    def _list(self, **filters: Any) -> list[Any]:
        with _asking():
            return self._client.list_workflows(**filters)


class Engine:
    """Works on runs from the queue, in this process. There can be one.

    Args:
        url: of its database; made where it is missing.
        executor: this process's name; what an earlier one of the same name had begun is gone on with.
        work: works on one run: its job in, its row out; steps are done by what it is given.
        batch: takes runs of this one alone; empty: of all.
    """

    def __init__(
        self, url: str, executor: str, work: Callable[[Json, StepRunner[Step]], Json], batch: str = ""
    ) -> None:
        quiet()
        config: DBOSConfig = {
            "name": NAME,
            "system_database_url": url,
            "application_version": VERSION,
            "executor_id": executor,
            "serializer": DBOSPortableJSONSerializer(),
            "max_executor_threads": THREADS,
            "log_level": "CRITICAL",
            "enable_otlp": False,
        }
        try:
            DBOS(config=config)

            @DBOS.workflow(name=WORKFLOW)
            def run(job: Json) -> Json:
                return work(job, _do)

            if batch:
                DBOS.listen_queues([batch])
            DBOS.launch()
        except Exception as error:  # dbos raises what it likes
            DBOS.destroy(destroy_registry=True)
            raise _unusable(error) from error

    def recover(self, executors: Sequence[str]) -> None:
        """Queues again what executors had begun that are surely dead."""
        DBOS._recover_pending_workflows(list(executors))

    def close(self) -> None:
        """Takes no more runs and ends. Only once no run is worked on here."""
        DBOS.destroy(destroy_registry=True)


def _do(name: str, kind: type[S], work: Callable[[], S]) -> S:
    def step() -> Json:
        try:
            return work().model_dump(mode="json")
        except Interrupted as stopped:
            # So that nothing is kept of the step: it is done again when the run is resumed.
            raise dbos_error.DBOSWorkflowCancelledError(stopped.message) from stopped

    return kind.model_validate(DBOS.run_step({"name": name}, step))


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    try:
        yield
    except SQLAlchemyError as error:
        raise _unusable(error) from error


def quiet() -> None:
    """dbos logs to the terminal by itself; what matters is told in our words."""
    logger = logging.getLogger("dbos")
    logger.setLevel(logging.CRITICAL)
    logger.propagate = False


def _unusable(error: Exception) -> InfrastructureError:
    said = str(error).strip().splitlines()
    return InfrastructureError(
        f"The batch's database cannot be used: {said[0][:300] if said else type(error).__name__}",
        hint="Is it up, and is its URL right?",
    )
