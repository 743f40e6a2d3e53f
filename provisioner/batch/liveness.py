"""Who of several workers on one Postgres database is alive: each keeps a lock in it for as long as it lives.

Postgres frees the lock when the worker's connection ends, however that happens; no clock is compared with another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import psycopg

from provisioner.errors import PresenceLostError

CONNECT_SECONDS = 10
# A machine that vanished sends no end of its connection: so many seconds later Postgres takes it for gone.
KEEPALIVE = {"tcp_keepalives_idle": 30, "tcp_keepalives_interval": 10, "tcp_keepalives_count": 3}


class LivenessLock:
    """This worker's sign of life.

    Args:
        url: of the database.
        worker: this worker's name.

    Raises:
        PresenceLostError: the database cannot be reached.
    """

    def __init__(self, url: str, worker: str) -> None:
        self._worker = worker
        try:
            self._connection = psycopg.connect(url, autocommit=True, connect_timeout=CONNECT_SECONDS)
            for name, value in KEEPALIVE.items():
                self._connection.execute(f"SET {name} = {value}".encode())
            self._connection.execute("SELECT pg_advisory_lock(%s)", (_number(worker),))
        except psycopg.Error as error:
            raise _lost(error) from error

    def dead(self, workers: Iterable[str]) -> list[str]:
        """Those of the workers that surely are dead.

        Raises:
            PresenceLostError: our own connection is lost: others take us for dead.
        """
        found = []
        try:
            for worker in set(workers) - {self._worker}:
                row = self._connection.execute("SELECT pg_try_advisory_lock(%s)", (_number(worker),)).fetchone()
                if row and row[0]:
                    self._connection.execute("SELECT pg_advisory_unlock(%s)", (_number(worker),))
                    found.append(worker)
            self._connection.execute("SELECT 1")
        except psycopg.Error as error:
            raise _lost(error) from error
        return found

    def close(self) -> None:
        """Gives the sign up."""
        self._connection.close()


def _number(worker: str) -> int:
    """Advisory locks have numbers of 64 bits with a sign."""
    return int.from_bytes(hashlib.sha256(worker.encode()).digest()[:8], signed=True)


def _lost(error: Exception) -> PresenceLostError:
    said = str(error).strip().splitlines()
    return PresenceLostError(
        f"The database that the workers share cannot be reached: {said[0][:300] if said else type(error).__name__}",
        hint="Is it up, and is its URL right? Other workers go on with what this one had begun.",
    )
