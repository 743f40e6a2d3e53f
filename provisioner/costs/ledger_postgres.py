"""Keeps the ledger in Postgres, for controllers on several machines that share one budget."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg.rows import dict_row

from provisioner.base.errors import InfrastructureError
from provisioner.costs.ledger import BUSY_SECONDS, COLUMNS, SCHEMA_VERSION, Connection, Ledger

# One schema per version of the table, so that another version of provisioner does not misread it.
SCHEMA = f"provisioner_{SCHEMA_VERSION}"
CONNECT_SECONDS = 10
# A database that vanishes does not close its connections. A process that uses one notices after about a minute, before
# other workers take over its runs (PostgreSQL's documentation, "Parameter Key Words"; the last is in milliseconds).
CLIENT_KEEPALIVE: dict[str, Any] = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
# A controller's host that vanishes does not close its connections either. Postgres notices after about a minute.
SERVER_KEEPALIVE = {"tcp_keepalives_idle": 30, "tcp_keepalives_interval": 10, "tcp_keepalives_count": 3}
# In milliseconds. A controller sends the statements of a transaction one after another. If it vanishes between two of
# them, Postgres ends its session and releases the ledger's lock, before those that wait for the lock give up.
TIMEOUTS_MS = {
    "idle_in_transaction_session_timeout": 30_000,
    "lock_timeout": int(BUSY_SECONDS * 1000),
}
# "provi" in ASCII: the advisory lock under which one controller creates the table.
CREATION_LOCK = 0x70726F7669


class _Postgres:
    """Wraps a Postgres connection to accept SQLite's parameter style."""

    def __init__(self, connection: psycopg.Connection[dict[str, Any]]) -> None:
        self._connection = connection

    @property
    def in_transaction(self) -> bool:
        status = psycopg.pq.TransactionStatus
        # Unknown is that of a lost connection, whose transaction Postgres rolls back by itself.
        return self._connection.info.transaction_status not in (status.IDLE, status.UNKNOWN)

    def execute(self, sql: str, values: dict[str, Any] | None = None, /) -> psycopg.Cursor[dict[str, Any]]:
        # Only the ledger writes these statements. In them, a colon appears only before a parameter's name.
        return self._connection.execute(re.sub(r":(\w+)", r"%(\1)s", sql).encode(), values)


class PostgresLedger(Ledger):
    """Keeps a ledger in a Postgres database and creates its schema there if it does not exist.

    Args:
        url: the database, as postgresql://USER@HOST:PORT/DATABASE.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def _exists(self) -> bool:
        return True

    def _begin(self, connection: Connection) -> None:
        connection.execute("BEGIN")
        connection.execute("LOCK TABLE entries IN SHARE ROW EXCLUSIVE MODE")

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Connection]:
        try:
            with contextlib.closing(
                psycopg.connect(
                    self._url,
                    autocommit=True,
                    row_factory=dict_row,
                    connect_timeout=CONNECT_SECONDS,
                    **CLIENT_KEEPALIVE,
                )
            ) as raw:
                connection = _Postgres(raw)
                raw.execute(f"SET search_path TO {SCHEMA}".encode())
                set_parameters(raw, SERVER_KEEPALIVE | TIMEOUTS_MS)
                if not raw.execute("SELECT to_regclass('entries') AS name").fetchone()["name"]:  # type: ignore[index]
                    _create_table(connection)
                yield connection
        except psycopg.errors.LockNotAvailable as error:
            seconds = TIMEOUTS_MS["lock_timeout"] / 1000
            raise InfrastructureError(
                f"The ledger in Postgres is in use: its lock was not free within {seconds:g} s.",
                hint="Nothing is launched without the ledger. `SELECT * FROM pg_stat_activity` shows the database's "
                "sessions: one of them holds the lock.",
            ) from error
        except psycopg.Error as error:
            lines = str(error).strip().splitlines()
            raise InfrastructureError(
                f"The ledger in Postgres cannot be used: {lines[0] if lines else type(error).__name__}",
                hint="Nothing is launched without the ledger. Is the database up, and is the URL right?",
            ) from error


def set_parameters(connection: psycopg.Connection[Any], parameters: dict[str, int]) -> None:
    """Sets a session's parameters of Postgres, in one round trip.

    Args:
        parameters: the values, by name, in Postgres's own units.

    Raises:
        psycopg.Error: the database does not answer or refuses one.
    """
    connection.execute("; ".join(f"SET {name} = {value}" for name, value in parameters.items()).encode())


def _create_table(connection: _Postgres) -> None:
    connection.execute("BEGIN")
    connection.execute(f"SELECT pg_advisory_xact_lock({CREATION_LOCK})")
    connection.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
    connection.execute(f"CREATE TABLE IF NOT EXISTS entries ({COLUMNS.replace('INTEGER', 'BIGINT')})")
    connection.execute("COMMIT")
