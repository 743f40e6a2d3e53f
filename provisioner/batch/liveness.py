"""Tells which of the workers that share a Postgres database are alive: each holds an advisory lock while it lives.

Postgres releases the lock when the worker's connection ends, for whatever reason, so no clocks are compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import psycopg

from provisioner.base.errors import LivenessLostError
from provisioner.costs.ledger_postgres import CLIENT_KEEPALIVE, SERVER_KEEPALIVE, set_parameters

CONNECT_TIMEOUT_SECONDS = 10
MESSAGE_CHARACTERS = 300


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
    lines = str(error).strip().splitlines()
    reason = lines[0][:MESSAGE_CHARACTERS] if lines else type(error).__name__
    return LivenessLostError(
        f"The database that the workers share cannot be reached: {reason}",
        hint="Is it up, and is its URL right? Other workers take over this one's runs.",
    )
