"""A user who can write to the queue's database puts pickles and nonsense into its rows.

No row may run code in a process that reads the queue: nothing is ever unpickled, whatever a row says about itself. A
job whose row was tampered with fails with a message; the other jobs run, and the engine lives.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import sqlite3
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from provisioner.batch.queue import VERSION, Engine, Json, QueueClient, sqlite_url
from provisioner.batch.steps import Step
from provisioner.batch.workflow import StepRunner
from tests.waiting import BOUND_SECONDS, until

AT = datetime(2026, 1, 2, tzinfo=UTC)
# A row's columns that dbos reads as data of the program, by table.
PAYLOADS = {
    "workflow_status": ("inputs", "output", "error"),
    "workflow_input": ("inputs",),
    "workflow_output": ("output", "error"),
    "operation_outputs": ("output", "error"),
}


class Bomb:
    """Pickles to a call that creates a file: the proof that a row ran code."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


class Attacked:
    """A queue on a file, and the attacker's access to it."""

    def __init__(self, directory: Path) -> None:
        self.url = sqlite_url(str(directory / "engine.sqlite"))
        self.file = directory / "engine.sqlite"
        self.trophy = directory / "ran"
        self.bomb = base64.b64encode(pickle.dumps(Bomb(self.trophy))).decode()
        self.worked: list[str] = []

    def work(self, job: Json, run_step: StepRunner[Any]) -> Json:
        run_step("first", Step, lambda: Step(at=AT))
        self.worked.append(job["name"])
        return {"name": job["name"]}

    def queue(self, *names: str) -> None:
        """Queues jobs, while no engine works."""
        Engine(self.url, "controller", self.work).close()
        client = QueueClient(self.url)
        client.add("batch", 1, {name: {"name": name} for name in names})
        client.close()

    def write(self, statement: str, *values: object) -> None:
        with sqlite3.connect(self.file, timeout=BOUND_SECONDS) as database:
            database.execute(statement, values)
        database.close()

    def tables(self) -> dict[str, set[str]]:
        """The columns of each table."""
        with sqlite3.connect(self.file, timeout=BOUND_SECONDS) as database:
            names = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            tables = {name: {row[1] for row in database.execute(f"PRAGMA table_info({name})")} for name in names}
        database.close()
        return tables

    def poison(self, name: str, payload: str, serialization: str) -> None:
        """Replaces all that is kept about a job."""
        for table, columns in PAYLOADS.items():
            present = [column for column in columns if column in self.tables()[table]]
            for column in present:
                self.write(
                    f"UPDATE {table} SET {column} = ? WHERE workflow_uuid = ? AND {column} IS NOT NULL",
                    payload, f"batch/{name}",
                )  # fmt: skip
            if "serialization" in self.tables()[table]:
                self.write(
                    f"UPDATE {table} SET serialization = ? WHERE workflow_uuid = ?", serialization, f"batch/{name}"
                )


@pytest.fixture
def attacked(tmp_path: Path) -> Attacked:
    return Attacked(tmp_path)


@pytest.fixture
def unpickled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was handed to pickle since the test began. (Modules that took its functions by name are not seen.)"""
    seen: list[str] = []

    def loads(data: bytes, *arguments: Any, **options: Any) -> Any:
        seen.append("loads")
        return pickle.Unpickler(io.BytesIO(data), *arguments, **options).load()

    monkeypatch.setattr(pickle, "loads", loads)
    return seen


@pytest.fixture
def started(attacked: Attacked) -> Iterator[Callable[[], QueueClient]]:
    """Starts an engine on the queue; returns a client."""
    opened: list[Engine | QueueClient] = []

    def start() -> QueueClient:
        opened.append(Engine(attacked.url, "controller", attacked.work))
        client = QueueClient(attacked.url)
        opened.append(client)
        return client

    yield start
    for resource in opened:
        resource.close()


def wait_for_end(client: QueueClient, *names: str) -> dict[str, str]:
    states: dict[str, str] = {}

    def have_ended() -> bool:
        states.update({key: state.state for key, state in client.states("batch").items()})
        return all(states[name] in ("done", "broken") for name in names)

    until(have_ended)
    return {name: states[name] for name in names}


def pickled(attacked: Attacked, name: str) -> None:
    attacked.poison(name, attacked.bomb, "py_pickle")


def unknown_format(attacked: Attacked, name: str) -> None:
    attacked.poison(name, attacked.bomb, "jsonpickle")


def nested(attacked: Attacked, name: str) -> None:
    attacked.poison(name, "[" * 100_000 + "]" * 100_000, "portable_json")


def vast(attacked: Attacked, name: str) -> None:
    attacked.poison(name, json.dumps({"positionalArgs": [{"name": "x" * (9 << 20)}]}), "portable_json")


def not_a_mapping(attacked: Attacked, name: str) -> None:
    attacked.poison(name, "[1]", "portable_json")


def other_workflow(attacked: Attacked, name: str) -> None:
    attacked.write("UPDATE workflow_status SET name = 'os.system' WHERE workflow_uuid = ?", f"batch/{name}")


def other_class(attacked: Attacked, name: str) -> None:
    attacked.write(
        "UPDATE workflow_status SET class_name = 'x', config_name = 'y' WHERE workflow_uuid = ?", f"batch/{name}"
    )


def wrong_roles(attacked: Attacked, name: str) -> None:
    attacked.write("UPDATE workflow_status SET authenticated_roles = '}' WHERE workflow_uuid = ?", f"batch/{name}")


def wrong_attributes(attacked: Attacked, name: str) -> None:
    attacked.write("UPDATE workflow_status SET attributes = '}' WHERE workflow_uuid = ?", f"batch/{name}")


def nested_attributes(attacked: Attacked, name: str) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    attacked.write("UPDATE workflow_status SET attributes = ? WHERE workflow_uuid = ?", deep, f"batch/{name}")


ROWS = [pickled, unknown_format, nested, vast, not_a_mapping, other_workflow, other_class]


@pytest.mark.parametrize("tamper", ROWS, ids=lambda tamper: tamper.__name__)
def test_a_tampered_job_fails_and_the_others_continue(
    attacked: Attacked,
    started: Callable[[], QueueClient],
    unpickled: list[str],
    tamper: Callable[[Attacked, str], None],
) -> None:
    attacked.queue("bad", "good")
    tamper(attacked, "bad")
    client = started()
    assert wait_for_end(client, "bad", "good") == {"bad": "broken", "good": "done"}
    assert isinstance(client.outputs("batch", ["bad"])["bad"], str)
    assert client.outputs("batch", ["good"])["good"] == {"name": "good"}
    assert attacked.worked == ["good"]
    assert unpickled == []
    assert not attacked.trophy.exists()


@pytest.mark.parametrize("tamper", ROWS[:5], ids=lambda tamper: tamper.__name__)
def test_the_result_of_a_job_that_was_tampered_with_is_a_message(
    attacked: Attacked,
    started: Callable[[], QueueClient],
    unpickled: list[str],
    tamper: Callable[[Attacked, str], None],
) -> None:
    attacked.queue("bad", "good")
    client = started()
    wait_for_end(client, "bad", "good")
    tamper(attacked, "bad")
    outputs = client.outputs("batch", ["bad", "good"])
    assert "not one that provisioner wrote" in str(outputs["bad"])
    assert outputs["good"] == {"name": "good"}
    client._client.list_workflows()  # loads inputs as well
    client._client.list_workflow_steps("batch/bad")
    assert unpickled == []
    assert not attacked.trophy.exists()


@pytest.mark.parametrize("column", ["output", "error"])
def test_a_step_that_a_row_claims_to_have_ended_is_not_unpickled(
    attacked: Attacked, started: Callable[[], QueueClient], unpickled: list[str], column: str
) -> None:
    attacked.queue("bad", "good")
    attacked.write(
        "INSERT INTO operation_outputs (workflow_uuid, function_id, function_name, serialization, retention_timestamp,"
        f" {column}) VALUES ('batch/bad', 1, 'first', 'py_pickle', 0, ?)",
        attacked.bomb,
    )
    client = started()
    assert wait_for_end(client, "bad", "good") == {"bad": "broken", "good": "done"}
    assert unpickled == []
    assert not attacked.trophy.exists()


def test_messages_events_streams_and_schedules_are_not_unpickled(
    attacked: Attacked, started: Callable[[], QueueClient], unpickled: list[str]
) -> None:
    attacked.queue("bad", "good")
    bomb = attacked.bomb
    attacked.write(
        "INSERT INTO notifications (destination_uuid, topic, message, message_uuid, serialization, created_at_epoch_ms)"
        " VALUES ('batch/bad', '__null__topic__', ?, 'x', 'py_pickle', 0)",
        bomb,
    )
    attacked.write(
        "INSERT INTO workflow_events (workflow_uuid, key, value, serialization)"
        " VALUES ('batch/bad', 'k', ?, 'py_pickle')",
        bomb,
    )
    attacked.write(
        "INSERT INTO streams (workflow_uuid, key, value, offset, function_id, serialization)"
        " VALUES ('batch/bad', 'k', ?, 0, 1, 'py_pickle')",
        bomb,
    )
    attacked.write(
        "INSERT INTO workflow_schedules (schedule_id, schedule_name, workflow_name, schedule, status, context)"
        " VALUES ('s', 's', 'run', '* * * * * *', 'ACTIVE', ?)",
        bomb,
    )
    client = started()
    assert wait_for_end(client, "good") == {"good": "done"}
    for read in (
        lambda: client._client.get_event("batch/bad", "k", timeout_seconds=0),
        lambda: list(client._client.read_stream("batch/bad", "k")),
        lambda: client._client.list_schedules(),
        lambda: client._client.retrieve_workflow("batch/bad").get_result(),
    ):
        with pytest.raises(Exception, match=r"."):  # noqa: PT012 - whatever it is, it is not the pickle's doing
            read()
            raise AssertionError("read as a plain text")
    assert unpickled == []
    assert not attacked.trophy.exists()


@pytest.mark.parametrize(
    "tamper", [wrong_roles, wrong_attributes, nested_attributes], ids=["roles", "attributes", "nested"]
)
def test_columns_that_provisioner_does_not_use_stop_no_batch(
    attacked: Attacked, started: Callable[[], QueueClient], tamper: Callable[[Attacked, str], None]
) -> None:
    attacked.queue("bad", "good")
    tamper(attacked, "bad")
    client = started()
    ended = wait_for_end(client, "bad", "good")
    assert ended["good"] == "done"
    assert client.outputs("batch", ["good"])["good"] == {"name": "good"}
    assert set(client.outputs("batch", ["bad"])) == {"bad"}


def test_a_forged_row_stops_no_batch(attacked: Attacked, started: Callable[[], QueueClient]) -> None:
    attacked.queue("good")
    client = started()
    wait_for_end(client, "good")
    attacked.write(
        "INSERT INTO workflow_status (workflow_uuid, status, name, created_at, updated_at, priority,"
        " application_version) VALUES ('batch/odd', 'WEIRD', 'run', 0, 0, 0, ?)",
        VERSION,
    )
    assert client.states("batch")["odd"].state == "broken"
    assert client.states("batch")["good"].state == "done"
