"""The durable queue on a file: what a run's steps gave outlives the process that ran them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.errors import InfrastructureError, Interrupted
from provisioner.batch.queue import Engine, Json, QueueClient, RunState, postgres_url, sqlite_url
from provisioner.batch.steps import ScoreStep, Step
from provisioner.batch.workflow import StepRunner
from tests.waiting import BOUND_SECONDS, until

AT = datetime(2026, 1, 2, tzinfo=UTC)
Work = Callable[[Json, StepRunner[Any]], Json]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return sqlite_url(str(tmp_path / "engine.sqlite"))


@pytest.fixture
def start(url: str) -> Iterator[Callable[[Work], QueueClient]]:
    """Starts an engine, and returns a client of its queue; both are closed at the end."""
    opened: list[Engine | QueueClient] = []

    def started(work: Work) -> QueueClient:
        opened.append(Engine(url, "controller", work))
        client = QueueClient(url)
        opened.append(client)
        return client

    yield started
    for resource in opened:
        resource.close()


def test_finished_steps_are_not_run_again_on_resume(start: Callable[[Work], QueueClient]) -> None:
    calls: list[str] = []
    interrupted = True

    def first() -> ScoreStep:
        calls.append("first")
        return ScoreStep(at=AT, score=0.5)

    def second() -> Step:
        calls.append("second")
        if interrupted:
            client.cancel("batch", ["a"])
            raise Interrupted("stop")
        return Step(at=AT)

    def work(job: Json, run_step: StepRunner[Any]) -> Json:
        score = run_step("first", ScoreStep, first).score
        run_step("second", Step, second)
        return {"n": job["n"], "score": score}

    client = start(work)
    client.add("batch", 1, {"a": {"n": 1}})
    until(lambda: client.states("batch")["a"].state == "cancelled")
    interrupted = False
    client.resume("batch", ["a"])
    until(lambda: client.states("batch")["a"].state == "done")
    assert calls == ["first", "second", "second"]
    assert client.outputs("batch", ["a"]) == {"a": {"n": 1, "score": 0.5}}


def test_only_another_cancellation_changes_a_cancelled_run(start: Callable[[Work], QueueClient]) -> None:
    begun, stop = threading.Event(), threading.Event()
    cleaned_up = False

    def step() -> Step:
        begun.set()
        assert stop.wait(BOUND_SECONDS)
        raise Interrupted("stop")

    def work(_job: Json, run_step: StepRunner[Any]) -> Json:
        nonlocal cleaned_up
        try:
            run_step("step", Step, step)
        finally:
            cleaned_up = True
        return {}

    def cancelled() -> RunState:
        client.cancel("batch", ["a"])
        return client.states("batch")["a"]

    client = start(work)
    client.add("batch", 1, {"a": {}})
    assert begun.wait(BOUND_SECONDS)
    first = cancelled()
    stop.set()
    until(lambda: cleaned_up)
    assert client.states("batch")["a"] == first
    until(lambda: cancelled() != first)  # its clock counts milliseconds
    assert (first.state, first.executor) == ("cancelled", "controller")


def test_a_run_whose_work_raises_is_broken_and_says_why(start: Callable[[Work], QueueClient]) -> None:
    def work(_job: Json, _run_step: StepRunner[Any]) -> Json:
        raise ValueError("nonsense")

    client = start(work)
    client.add("batch", 1, {"a": {}})
    until(lambda: client.states("batch")["a"].state == "broken")
    assert "nonsense" in str(client.outputs("batch", ["a"])["a"])


def test_an_unusable_database_is_an_infrastructure_error(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="cannot be used"):
        QueueClient(sqlite_url(str(tmp_path / "missing" / "engine.sqlite"))).states("batch")


def test_postgres_is_reached_with_the_driver_that_is_installed() -> None:
    url = postgres_url("postgres://u@h/d")
    assert url == postgres_url("postgresql://u@h/d")
    # It notices within a minute that the database is gone, unless the operator's URL says how soon.
    assert url.startswith("postgresql+psycopg://u@h/d?keepalives_idle=30&")
    assert "tcp_user_timeout=60000" in url
    query = "host=a:5432&host=b:5432&keepalives_idle=5"  # what the operator writes stays as it is
    own = postgres_url(f"postgres://u@/d?{query}")
    assert own.startswith(f"postgresql+psycopg://u@/d?{query}&keepalives_interval=10&")
    assert own.count("keepalives_idle") == 1
