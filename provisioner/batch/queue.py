"""The durable queue of runs: the results of finished steps survive any crash. The only module that imports dbos.

What is read from the queue is another process's word, and perhaps an attacker's: a row that cannot be understood is
one broken run, never an error of the batch. dbos itself obeys a row's own column `serialization`, which may name
pickle: so any user that can write to the database could run code in each process that reads it. This module replaces
dbos's ways of reading, for the whole process: rows are bounded JSON, and no pickle is ever read or written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qsl, urlencode

from dbos import DBOS, DBOSClient, DBOSConfig, DBOSPortableJSONSerializer, _dbos, _queue, _serialization, _sys_db
from dbos import error as dbos_error
from dbos._error import DBOSException
from psycopg import Connection as PostgresConnection
from psycopg.types.json import set_json_loads
from sqlalchemy import event
from sqlalchemy.engine import Engine as DatabaseEngine
from sqlalchemy.exc import SQLAlchemyError

from provisioner.base import strict_json
from provisioner.base.errors import InfrastructureError, Interrupted
from provisioner.base.models import Record
from provisioner.batch.steps import Step
from provisioner.batch.workflow import StepRunner
from provisioner.costs.ledger_postgres import CLIENT_KEEPALIVE

REFUSED = "The queue's row of this run is not one that provisioner wrote: another user of the database changed it."

_JSON = DBOSPortableJSONSerializer()
_execute = vars(_queue)["execute_dequeued_workflow"]


class RefusedRowError(ValueError):
    """Raised for a row that is not bounded JSON."""

    def __init__(self) -> None:
        super().__init__(REFUSED)


def serializer() -> DBOSPortableJSONSerializer:
    """Returns the serializer to open the engine and its clients with."""
    return _JSON


def _refuse(_self: object, _data: object) -> Any:
    raise RefusedRowError


def _read_json(_self: object, text: str | None) -> Any:
    """Reads a row's JSON; refuses it if it is not strict, or too large."""
    if text is None:
        return None
    try:
        return strict_json.parse(text.encode())
    except (AttributeError, ValueError) as error:  # AttributeError: no text at all
        raise RefusedRowError from error


def read_unused_json(text: str | bytes) -> Any:
    """Reads the JSON of a column that provisioner does not use; returns None for what is no bounded JSON.

    dbos reads such columns of all rows at once. An error would hide every run of the batch.
    """
    try:
        return _read_json(None, text.decode() if isinstance(text, bytes) else text)
    except ValueError:
        return None


def _execute_or_end(dbos: Any, status: Any, owner_xid: str) -> Any:
    """Starts a run that this process has taken from the queue; ends it as failed if its row cannot be used.

    dbos itself would leave most such rows assigned to this process forever, where they count as running.
    """
    try:
        return _execute(dbos, status, owner_xid)
    except (DBOSException, ValueError, TypeError, KeyError, AttributeError) as error:
        message = _JSON.serialize(_serialization.exception_to_workflow_error_data(error))
        dbos._sys_db.update_workflow_outcome(status["workflow_uuid"], "ERROR", error=message, owner_xid=owner_xid)
        raise


def _run_no_schedules(*_: object) -> None:
    """Ends dbos's thread for schedules at once: provisioner has none, and a row must not start any."""


def _replace() -> None:
    """Replaces what dbos reads and writes rows with. The attack tests fail if a version of dbos has another way."""
    vars(_serialization).pop("pickle", None)
    vars(_sys_db)["json"] = SimpleNamespace(loads=read_unused_json, dumps=json.dumps)
    for name in ("serialize", "deserialize"):
        setattr(_serialization.DefaultSerializer, name, _refuse)
    setattr(DBOSPortableJSONSerializer, "deserialize", _read_json)  # noqa: B010 - mypy refuses the assignment
    setattr(_queue, "execute_dequeued_workflow", _execute_or_end)  # noqa: B010
    setattr(_dbos, "dynamic_scheduler_loop", _run_no_schedules)  # noqa: B010


_replace()


# An engine continues only runs that were begun by an engine of the same version. Change it together with the steps.
VERSION = "1"
NAME = "provisioner"
WORKFLOW = "run"
# An upper bound on the runs that one process works on at once; threads are started only as they are needed.
MAX_THREADS = 1100
POLLING_SECONDS = 0.5
MESSAGE_CHARACTERS = 300

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

S = TypeVar("S", bound=Step)
Json = dict[str, Any]


@event.listens_for(DatabaseEngine, "do_connect")
def _read_json_columns(dialect: Any, *_: object) -> None:
    """Makes SQLAlchemy read JSON columns by our bounded reader. psycopg reads its own: `_read_json_of_postgres`."""
    dialect._json_deserializer = read_unused_json


@event.listens_for(DatabaseEngine, "connect")
def _read_json_of_postgres(connection: object, _: object) -> None:
    if isinstance(connection, PostgresConnection):
        set_json_loads(read_unused_json, connection)


@event.listens_for(DatabaseEngine, "connect")
def _teach_subseconds(connection: object, _: object) -> None:
    """Defines unixepoch('subsec') where SQLite lacks it.

    DBOS calls it if Python is 3.12 or newer. SQLite has it since 3.42 (its release history), and Debian 12 has 3.40.
    """
    if isinstance(connection, sqlite3.Connection) and sqlite3.sqlite_version_info < (3, 42):
        connection.create_function("unixepoch", 1, lambda modifier: time.time() if modifier == "subsec" else None)


class RunState(Record):
    """The state of a run in the queue.

    Args:
        key: the run's.
        executor: name of the process that works on it, or worked on it last.
        started_at: when it was last taken from the queue.
        changed_at: when its state was last set, by the queue's clock; also if it was set to what it was.
    """

    key: str
    state: State
    executor: str = ""
    started_at: datetime | None = None
    changed_at: datetime | None = None


def sqlite_url(path: str) -> str:
    """Returns the URL of an engine's database in a file."""
    return f"sqlite:///{path}"


def postgres_url(url: str) -> str:
    """Returns a Postgres URL as SQLAlchemy wants it: with the driver that is installed, and signs of life."""
    scheme, colon, rest = url.partition("://")
    if scheme not in ("postgres", "postgresql"):
        return url
    address, _, query = rest.partition("?")
    chosen = {name for name, _ in parse_qsl(query, keep_blank_values=True)}
    added = urlencode({name: value for name, value in CLIENT_KEEPALIVE.items() if name not in chosen})
    return f"postgresql+psycopg{colon}{address}?{'&'.join(filter(None, (query, added)))}"


class QueueClient:
    """Reads and changes the queue, from any process, whether it works on runs or not.

    Args:
        url: of the engine's database, in which an engine must have run before.

    Raises:
        InfrastructureError: here and in all methods, if the database cannot be used.
    """

    def __init__(self, url: str) -> None:
        silence_dbos()
        try:
            self._client = DBOSClient(
                system_database_url=url, serializer=serializer(), application_name=NAME, retry_connection_errors=False
            )
        except Exception as error:  # dbos raises errors of many kinds
            raise _unusable(error) from error

    def close(self) -> None:
        """Closes the connections to the database."""
        self._client.destroy()

    def add(self, batch: str, active: int, jobs: Mapping[str, Json]) -> None:
        """Queues runs; leaves those unchanged that have been queued before.

        Args:
            batch: the batch's id.
            active: how many of the batch's runs may be worked on at once, by all processes together.
            jobs: by the runs' keys.
        """
        with _translated_errors():
            self._client.register_queue(
                batch, global_concurrency=active, polling_interval_sec=POLLING_SECONDS, on_conflict="always_update"
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
        """Returns the states of a batch's runs, by key."""
        prefix = f"{batch}/"
        workflows = self._list(workflow_id_prefix=prefix, load_input=False, load_output=False)
        states = (_state(workflow, workflow.workflow_id.removeprefix(prefix)) for workflow in workflows)
        return {state.key: state for state in states}

    def outputs(self, batch: str, keys: Sequence[str]) -> dict[str, Json | str]:
        """Returns the outputs of ended runs by key: a row, or the error's text if the work raised one."""
        if not keys:
            return {}
        workflows = self._list(workflow_ids=[f"{batch}/{key}" for key in keys], load_input=False)
        return {workflow.workflow_id.removeprefix(f"{batch}/"): _output(workflow) for workflow in workflows}

    def cancel(self, batch: str, keys: Sequence[str]) -> None:
        """Cancels runs that have not ended. A process that works on one learns of it from the run's state."""
        if keys:
            with _translated_errors():
                self._client.cancel_workflows([f"{batch}/{key}" for key in keys])

    def resume(self, batch: str, keys: Sequence[str]) -> None:
        """Queues cancelled runs again; each continues after its last finished step."""
        if keys:
            with _translated_errors():
                self._client.resume_workflows([f"{batch}/{key}" for key in keys], queue_name=batch)

    def executors(self) -> set[str]:
        """Returns the names of the processes to which the queue has assigned runs, of any batch."""
        workflows = self._list(status="PENDING", load_input=False, load_output=False)
        return {workflow.executor_id for workflow in workflows if workflow.executor_id}

    def _list(self, **filters: Any) -> list[Any]:
        with _translated_errors():
            return self._client.list_workflows(**filters)


class Engine:
    """Takes runs from the queue and works on them, in this process. There can be only one engine per process.

    Args:
        url: of its database, which is created if it does not exist.
        executor: this process's name. Runs that an earlier process of the same name had begun are continued.
        work: works on one run: takes its job and a step runner, and returns its row.
        batch: id of the only batch whose runs are taken; empty: runs of all batches.

    Raises:
        InfrastructureError: the database cannot be used.
    """

    def __init__(
        self, url: str, executor: str, work: Callable[[Json, StepRunner[Step]], Json], batch: str = ""
    ) -> None:
        silence_dbos()
        config: DBOSConfig = {
            "name": NAME,
            "system_database_url": url,
            "application_version": VERSION,
            "executor_id": executor,
            "serializer": serializer(),
            "max_executor_threads": MAX_THREADS,
            "log_level": "CRITICAL",
            "enable_otlp": False,
        }
        try:
            DBOS(config=config)

            @DBOS.workflow(name=WORKFLOW)
            def run(job: Json) -> Json:
                return work(job, _run_step)

            if batch:
                DBOS.listen_queues([batch])
            DBOS.launch()
        except Exception as error:  # dbos raises errors of many kinds
            DBOS.destroy(destroy_registry=True)
            raise _unusable(error) from error

    def recover(self, executors: Sequence[str]) -> None:
        """Queues again the runs of processes that are certainly dead."""
        DBOS._recover_pending_workflows(list(executors))

    def close(self) -> None:
        """Takes no more runs and ends. Must not be called while a run is active in this process."""
        DBOS.destroy(destroy_registry=True)


def _run_step(name: str, kind: type[S], work: Callable[[], S]) -> S:
    """Runs a step once: its result is kept, and returned if the run is continued after a crash."""

    def step() -> Json:
        try:
            return work().model_dump(mode="json")
        except Interrupted as interrupted:
            # With this error nothing of the step is kept, and it is run again when the run is resumed.
            raise dbos_error.DBOSWorkflowCancelledError(interrupted.message) from interrupted

    return kind.model_validate(DBOS.run_step({"name": name}, step))


def _state(workflow: Any, key: str) -> RunState:
    """Returns the state that a row claims; a state or time that dbos does not write makes the run broken."""
    state = _STATES.get(workflow.status, "broken")
    started_at = changed_at = None
    try:
        started_at, changed_at = _time(workflow.dequeued_at), _time(workflow.updated_at)
    except (ValueError, TypeError, OverflowError, OSError):
        state = "broken"
    executor = str(workflow.executor_id or "")
    return RunState(key=key, state=state, executor=executor, started_at=started_at, changed_at=changed_at)


def _time(milliseconds: Any) -> datetime | None:
    return datetime.fromtimestamp(milliseconds / 1000, UTC) if milliseconds else None


def _output(workflow: Any) -> Json | str:
    """Returns a row's output or its error's text; dbos hands out what it cannot read as the row's own text."""
    if isinstance(workflow.output, dict):
        return workflow.output
    if workflow.output is None and isinstance(workflow.error, Exception):
        return str(workflow.error)
    return REFUSED


@contextlib.contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except SQLAlchemyError as error:
        raise _unusable(error) from error


def silence_dbos() -> None:
    """Keeps dbos from logging to the terminal; errors that matter are raised as our own."""
    logger = logging.getLogger("dbos")
    if not logger.handlers:  # dbos would add one, for what is stderr now
        logger.addHandler(logging.NullHandler())
    logger.propagate = False


def _unusable(error: Exception) -> InfrastructureError:
    return InfrastructureError(
        f"The batch's database cannot be used: {first_line(error)}", hint="Is it up, and is its URL right?"
    )


def first_line(error: Exception) -> str:
    """Returns the beginning of a database's error, or its kind if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:MESSAGE_CHARACTERS] if lines else type(error).__name__
