"""What several controllers share in Postgres: the ledger, and the knowledge of which workers live."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from provisioner.base.errors import BudgetError, InfrastructureError
from provisioner.batch.worker import LivenessLock
from provisioner.costs import ledger_postgres
from provisioner.costs.ledger import Budget, Entry, Traffic
from provisioner.costs.ledger_postgres import PostgresLedger
from tests.batch import postgres
from tests.command_line import ROOT

pytestmark = [pytest.mark.xdist_group("workers"), pytest.mark.story]
AT = datetime(2026, 1, 31, 12, tzinfo=UTC)
BUDGET = [Budget(scope="project", of="p", micro_usd=20_000_000, name="the budget")]


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with postgres.serving() as url:
        yield url


@pytest.fixture
def ledger(database: str) -> Iterator[PostgresLedger]:
    yield PostgresLedger(database)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS provisioner_2 CASCADE")


def entry(name: str, held: int) -> Entry:
    return Entry(
        environment=name, kind="task", cloud="aws", region="r", family="f", task="t", batch="b", project="p",
        command="c", launched_at=AT, expires_at=AT + timedelta(hours=4), reserved_micro_usd=held,
    )  # fmt: skip


def test_it_does_what_the_ledger_file_does(ledger: PostgresLedger) -> None:
    assert ledger.entries() == []
    assert ledger.latest_ends("aws").on_cloud is None
    ledger.reserve(entry("one", 15_000_000), BUDGET)
    ends = [(each.paid, each.on_cloud) for each in map(ledger.latest_ends, ("aws", "local"))]
    assert ends == [(AT + timedelta(hours=4), AT + timedelta(hours=4)), (AT + timedelta(hours=4), None)]
    with pytest.raises(BudgetError, match=r"15\.0000 USD reserved \+ 6\.0000 USD") as refused:
        ledger.reserve(entry("two", 6_000_000), BUDGET)
    assert refused.value.may_fit_later
    ledger.extend("one", AT + timedelta(hours=5), 16_000_000, lambda _: BUDGET)
    assert ledger.entries(unsettled=True)[0].reserved_micro_usd == 16_000_000
    with pytest.raises(BudgetError) as refused:
        ledger.extend("one", AT + timedelta(hours=9), 21_000_000, lambda _: BUDGET)
    assert not refused.value.may_fit_later
    sent = Traffic(
        environment="one", cloud="aws", region="r", instances=("i-1",), launched_at=AT, ended_at=AT,
        usd_per_gb=Decimal("0.09"), counted_micro_usd=1_000_000,
    )  # fmt: skip
    ledger.settle("one", AT + timedelta(hours=1), 4_000_000, sent)
    assert (ledger.uncounted_traffic("aws"), ledger.uncounted_traffic("local")) == ([sent], [])
    ledger.count_traffic("one", 3_000_000, is_all=False)
    assert ledger.mean_cost("aws", "f", "t") == (1, 6_000_000)
    ledger.count_traffic("one", 1_000_000, is_all=True)
    ledger.count_traffic("one", 9_000_000, is_all=True)
    assert (ledger.uncounted_traffic("aws"), ledger.mean_cost("aws", "f", "t")) == ([], (1, 4_000_000))
    ledger.settle("one", AT + timedelta(hours=2), 9_000_000)
    ledger.reserve(entry("two", 3_000_000_000), [Budget(scope="month", of="2026-01", micro_usd=1 << 40, name="month")])
    assert [(one.environment, one.counted_micro_usd) for one in ledger.entries()] == [
        ("one", 4_000_000), ("two", 3_000_000_000),
    ]  # fmt: skip
    ledger.reserve(entry("two", 1), BUDGET)  # the same again replaces its reservation
    ledger.settle_late("two", AT + timedelta(hours=8))
    assert ledger.entries(unsettled=True) == []


def test_a_controller_that_vanishes_does_not_block_others(
    ledger: PostgresLedger, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.reserve(entry("one", 1))
    monkeypatch.setitem(ledger_postgres.TIMEOUTS_MS, "idle_in_transaction_session_timeout", 200)

    def reserve_another(_: Entry) -> list[Budget]:
        """Runs while the first controller holds the lock and sends nothing."""
        PostgresLedger(database).reserve(entry("two", 1))
        return []

    names = ["one"]
    while names == ["one"]:  # on a busy host, the lock may be gone before the other controller asks for it
        with pytest.raises(InfrastructureError, match="idle-in-transaction timeout"):
            ledger.extend("one", AT + timedelta(hours=5), 2, reserve_another)
        names = [each.environment for each in ledger.entries()]
    assert ledger.entries(environment="one")[0].reserved_micro_usd == 1


def test_a_lock_that_is_not_had_in_time_is_said(
    ledger: PostgresLedger, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.reserve(entry("one", 1))
    monkeypatch.setitem(ledger_postgres.TIMEOUTS_MS, "lock_timeout", 100)

    def reserve_another(_: Entry) -> list[Budget]:
        with pytest.raises(InfrastructureError, match=r"its lock was not free within 0\.1 s"):
            PostgresLedger(database).reserve(entry("two", 1))
        return []

    ledger.extend("one", AT + timedelta(hours=5), 2, reserve_another)
    assert [(each.environment, each.reserved_micro_usd) for each in ledger.entries()] == [("one", 2)]


def launch(url: str, names: list[str], results: Any, start: Any) -> None:
    ledger = PostgresLedger(url)
    start.wait()
    for name in names:
        try:
            ledger.reserve(entry(name, 500_000), BUDGET)
            results.put(True)
        except BudgetError:
            results.put(False)


def test_controllers_on_one_ledger_never_overshoot(ledger: PostgresLedger, database: str) -> None:
    context = multiprocessing.get_context("spawn")
    results, start = context.Queue(), context.Event()
    groups = [[f"{process}-{number}" for number in range(15)] for process in range(4)]
    processes = [context.Process(target=launch, args=(database, names, results, start)) for names in groups]
    for process in processes:
        process.start()
    start.set()
    granted = [results.get(timeout=60) for _ in range(60)]
    for process in processes:
        process.join()
    assert (granted.count(True), granted.count(False)) == (40, 20)
    assert sum(one.reserved_micro_usd for one in ledger.entries()) == 20_000_000


WORKER = """
import sys
from provisioner.batch.worker import LivenessLock
liveness = LivenessLock(sys.argv[1], "other")
print("here", flush=True)
sys.stdin.read()
"""


def test_a_worker_is_dead_once_its_process_is(database: str) -> None:
    mine = LivenessLock(database, "mine")
    argv = [sys.executable, "-c", WORKER, database]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"here\n"
        assert mine.dead_workers(["mine", "other", "never"]) == ["never"]
        other.kill()
        other.wait()
    deadline = time.monotonic() + 60
    while mine.dead_workers(["other"]) != ["other"]:  # its server process has yet to see that it is gone
        assert time.monotonic() < deadline
        time.sleep(0.1)
    mine.close()
    with pytest.raises(InfrastructureError, match="cannot be reached"):
        mine.dead_workers(["other"])


def test_a_worker_notices_soon_that_the_database_does_not_answer(database: str) -> None:
    mine = LivenessLock(database, "mine")
    with socket.socket(fileno=os.dup(mine._connection.fileno())) as connection:
        idle, pause, count = (
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        unanswered_ms = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    mine.close()
    # Postgres itself takes as long to consider the worker dead, whose runs others then take over.
    assert idle + pause * count <= 60
    assert 0 < unanswered_ms <= 60_000


OWN_QUEUE = """
import sys, time
from provisioner.batch.queue import Engine, QueueClient, postgres_url

url = postgres_url(sys.argv[1])
engine = Engine(url, "me", lambda job, do: job, "mine")
client = QueueClient(url)
client.add("mine", 1, {"a": {"n": 1}})
client.add("other", 1, {"b": {"n": 2}})
deadline = time.monotonic() + 60
while client.states("mine")["a"].state != "done" and time.monotonic() < deadline:
    time.sleep(0.2)
time.sleep(3)  # six times what a queue waits between two looks
print(client.states("mine")["a"].state, client.states("other")["b"].state)
client.close()
engine.close()
"""


def test_a_controller_of_one_batch_leaves_other_runs_to_workers(database: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OWN_QUEUE, database], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["done", "queued"], done.stderr[-2000:]


def test_a_ledger_that_cannot_be_reached_stops_launches() -> None:
    with pytest.raises(InfrastructureError, match="cannot be used"):
        PostgresLedger("postgresql://nobody@127.0.0.1:1/nothing").reserve(entry("one", 1))
