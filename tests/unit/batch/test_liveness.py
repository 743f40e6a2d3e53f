"""A worker that cannot show that it is alive must not work. tests/batch/test_postgres.py shows what locks tell."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from provisioner.batch.liveness import LivenessLock
from provisioner.errors import LivenessLostError


def test_a_database_that_cannot_be_reached_is_a_lost_connection_and_its_password_stays_secret() -> None:
    with pytest.raises(LivenessLostError, match="cannot be reached") as error:
        LivenessLock("postgresql://nobody:secret@127.0.0.1:1/nothing", "worker")
    assert "secret" not in error.value.message


class Postgres:
    """Counts advisory locks as Postgres does: a session may have one several times (PostgreSQL manual, 13.3.5)."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.cancels_next_unlock = False

    def execute(self, query: Any, values: tuple[Any, ...] = ()) -> Postgres:
        if "pg_advisory_unlock" in str(query):
            if self.cancels_next_unlock:
                self.cancels_next_unlock = False
                raise psycopg.errors.QueryCanceled("canceling statement due to statement timeout")
            time.sleep(0.01)  # others want to unlock meanwhile
            self.held[values[0]] -= 1
        elif "unnest" in str(query):
            self.row = (values[0][0],)
            self.held[values[0][0]] = self.held.get(values[0][0], 0) + 1
        return self

    def fetchone(self) -> tuple[int]:
        return self.row


def test_a_lock_whose_release_was_cancelled_is_released_before_the_next_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database = Postgres()
    monkeypatch.setattr(psycopg, "connect", lambda *_, **__: database)
    lock = LivenessLock("postgresql://somewhere/", "worker")
    assert lock.take_first(["turn"]) == "turn"
    database.cancels_next_unlock = True
    lock.give_back("turn")
    assert lock.take_first(["turn"]) == "turn"
    lock.give_back("turn")
    assert sum(database.held.values()) == 0


def test_runs_that_give_their_locks_back_at_once_release_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    database = Postgres()
    monkeypatch.setattr(psycopg, "connect", lambda *_, **__: database)
    lock = LivenessLock("postgresql://somewhere/", "worker")
    names = [f"turn {number}" for number in range(8)]
    for name in names:
        lock.take_first([name])
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lock.give_back, names))
    assert set(database.held.values()) == {0}
