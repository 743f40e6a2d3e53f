"""The ledger: what every launch may cost at most, and what it did cost. One database, any number of controllers.

A launch takes a hold of its worst case before anything is created, and settles once the cloud has confirmed the end.
Each hold is checked and taken in one transaction that keeps all other writers out, so that no two controllers can
take the same room twice.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from math import ceil
from pathlib import Path
from typing import Any, Literal, Protocol

from provisioner.costs.prices import dollars
from provisioner.errors import BudgetError, InfrastructureError
from provisioner.models import Record

# A hold takes a millisecond; a busy host may keep its writer waiting.
BUSY_SECONDS = 60.0
SCHEMA_VERSION = 1
COLUMNS = """
    environment TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    cloud TEXT NOT NULL,
    region TEXT NOT NULL,
    family TEXT NOT NULL,
    task TEXT,
    batch TEXT NOT NULL,
    project TEXT NOT NULL,
    command TEXT NOT NULL,
    launched_at TEXT NOT NULL,
    expires_at TEXT NOT NULL,
    held_micro_usd INTEGER NOT NULL CHECK (held_micro_usd >= 0),
    ended_at TEXT,
    actual_micro_usd INTEGER CHECK (actual_micro_usd >= 0)
"""

Scope = Literal["command", "project", "month"]
# What of the ledger counts against each kind of limit.
_COUNTS: dict[Scope, str] = {
    "command": "command = :of",
    "project": "project = :of",
    "month": "substr(launched_at, 1, 7) = :of",
}


_SUMS = (
    "SELECT coalesce(sum(actual_micro_usd), 0) AS spent, "
    "coalesce(sum(CASE WHEN actual_micro_usd IS NULL THEN held_micro_usd ELSE 0 END), 0) AS held "
    "FROM entries WHERE environment != :environment"
)


class Limit(Record):
    """A sum that may not be exceeded.

    Args:
        scope: what counts: a command's launches, a project's of all time, a calendar month's (UTC).
        of: the command's id, the project's name, or the month as 2026-01.
        micro_usd: the sum, in millionths of a US dollar.
        name: what messages call it, as "--budget" or "budget.month".
    """

    scope: Scope
    of: str
    micro_usd: int
    name: str


class Entry(Record):
    """One launch: a task's environment or an image's builder.

    Args:
        command: id of the command that launched it.
        held_micro_usd: its worst case.
        ended_at, actual_micro_usd: once it is settled; None while it is held.
    """

    environment: str
    kind: str
    cloud: str
    region: str
    family: str
    task: str | None
    batch: str
    project: str
    command: str
    launched_at: datetime
    expires_at: datetime
    held_micro_usd: int
    ended_at: datetime | None = None
    actual_micro_usd: int | None = None

    @property
    def counted_micro_usd(self) -> int:
        """What counts against budgets: the actual cost once it is known."""
        return self.held_micro_usd if self.actual_micro_usd is None else self.actual_micro_usd


class Connection(Protocol):
    """What the ledger needs of a database: values are marked as :name, rows have names."""

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction was begun and not ended."""

    def execute(self, sql: str, values: dict[str, Any] = ..., /) -> Any:
        """Runs one statement; the answer has fetchone() and fetchall()."""


class Ledger:
    """A ledger in a SQLite file, which the first hold makes with mode 0600.

    Args:
        path: the file; its directory must exist by then.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def hold(self, entry: Entry, limits: Iterable[Limit] = ()) -> None:
        """Takes a hold, if it fits every limit. The same environment again replaces its hold.

        Raises:
            BudgetError: it does not fit; nothing was taken.
        """
        with self._writing() as connection:
            for limit in limits:
                _require_room(connection, entry, limit)
            values = entry.model_dump(mode="json")
            columns, marks = ", ".join(values), ", ".join(f":{name}" for name in values)
            changes = ", ".join(f"{name} = excluded.{name}" for name in values)
            # The columns are the model's own fields.
            connection.execute(
                f"INSERT INTO entries ({columns}) VALUES ({marks}) ON CONFLICT (environment) DO UPDATE SET {changes}",  # noqa: S608
                values,
            )

    def extend(
        self,
        environment: str,
        expires_at: datetime,
        held_micro_usd: int,
        limits: Callable[[Entry], Iterable[Limit]] = lambda _: (),
    ) -> None:
        """Makes an unsettled hold larger, if that fits every limit. Nothing happens if there is none.

        Args:
            limits: those that hold for an entry.

        Raises:
            BudgetError: it does not fit; the hold is as it was.
        """
        with self._writing() as connection:
            row = connection.execute(
                "SELECT * FROM entries WHERE environment = :environment AND actual_micro_usd IS NULL",
                {"environment": environment},
            ).fetchone()
            if row is None:
                return
            entry = Entry.model_validate(dict(row))
            changed = entry.model_copy(update={"expires_at": expires_at, "held_micro_usd": held_micro_usd})
            for limit in limits(changed):
                _require_room(connection, changed, limit)
            connection.execute(
                "UPDATE entries SET expires_at = :expires_at, held_micro_usd = :held_micro_usd "
                "WHERE environment = :environment",
                changed.model_dump(mode="json", include={"expires_at", "held_micro_usd", "environment"}),
            )

    def settle(self, environment: str, ended_at: datetime, actual_micro_usd: int) -> None:
        """Replaces a hold by the actual cost. Nothing happens if it is settled, or if there is none."""
        if not self._exists():
            return
        with self._writing() as connection:
            connection.execute(
                "UPDATE entries SET ended_at = :ended_at, actual_micro_usd = :actual "
                "WHERE environment = :environment AND actual_micro_usd IS NULL",
                {"ended_at": ended_at.isoformat(), "actual": actual_micro_usd, "environment": environment},
            )

    def settle_late(self, environment: str, ended_at: datetime) -> None:
        """Settles what has no record any more, by its hold: the part of it that the time until its end is."""
        for entry in self.entries(unsettled=True, environment=environment):
            ended_at = min(ended_at, entry.expires_at)
            whole = (entry.expires_at - entry.launched_at).total_seconds()
            lived = (ended_at - entry.launched_at).total_seconds()
            self.settle(environment, ended_at, min(entry.held_micro_usd, ceil(entry.held_micro_usd * lived / whole)))

    def entries(self, *, unsettled: bool = False, batch: str = "", environment: str = "") -> list[Entry]:
        """Entries by launch: all, or those that are still held, of one batch, of one environment."""
        if not self._exists():
            return []
        asked = [
            ("actual_micro_usd IS NULL", unsettled),
            ("batch = :batch", batch),
            ("environment = :environment", environment),
        ]
        only = " AND ".join(["1 = 1", *(condition for condition, wanted in asked if wanted)])
        with self._connection() as connection:
            rows = connection.execute(
                f"SELECT * FROM entries WHERE {only} ORDER BY launched_at, environment",  # noqa: S608 - no value in it
                {"batch": batch, "environment": environment},
            ).fetchall()
        return [Entry.model_validate(dict(row)) for row in rows]

    def _exists(self) -> bool:
        return self._path.exists()

    def _begin(self, connection: Connection) -> None:
        """Begins a transaction that keeps all other writers out."""
        connection.execute("BEGIN IMMEDIATE")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Connection]:
        with self._connection() as connection:
            self._begin(connection)
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # a Ctrl-C during COMMIT comes after it
                    connection.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Connection]:
        try:
            self._path.touch(mode=0o600)
            with contextlib.closing(
                sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None)
            ) as connection:
                connection.row_factory = sqlite3.Row
                # A hold that was granted survives a power failure.
                connection.execute("PRAGMA synchronous = FULL")
                version = connection.execute("PRAGMA user_version").fetchone()[0]
                if version not in (0, SCHEMA_VERSION):
                    raise InfrastructureError(
                        f"The ledger {self._path} is of another version of provisioner ({version})."
                    )
                if version == 0:
                    connection.execute(f"CREATE TABLE IF NOT EXISTS entries ({COLUMNS}) STRICT")
                    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                yield connection
        except (sqlite3.Error, OSError) as error:
            raise InfrastructureError(
                f"The ledger {self._path} cannot be used: {error}",
                hint="Nothing is launched without it. Is the disk full, or the file damaged?",
            ) from error


def _require_room(connection: Connection, entry: Entry, limit: Limit) -> None:
    """Raises BudgetError, with the arithmetic, if an entry does not fit beside what counts already."""
    sums = connection.execute(
        f"{_SUMS} AND {_COUNTS[limit.scope]}", {"of": limit.of, "environment": entry.environment}
    ).fetchone()
    spent, held = int(sums["spent"]), int(sums["held"])
    total = spent + held + entry.held_micro_usd
    if total > limit.micro_usd:
        raise BudgetError(
            f"{entry.environment} does not fit {limit.name}: {dollars(spent)} spent + {dollars(held)} held + "
            f"{dollars(entry.held_micro_usd)} for this launch at the most = {dollars(total)}, "
            f"more than {dollars(limit.micro_usd)}.",
            hint="Give it a shorter --ttl or a smaller machine, wait until others have ended, or raise the budget. "
            "`provisioner costs` shows what is held.",
        )


def by_day(entry: Entry) -> str:
    """The day of the launch (UTC), as 2026-01-31."""
    return entry.launched_at.strftime("%Y-%m-%d")


class Total(Record):
    """What a group of entries comes to, in millionths of a US dollar."""

    group: str
    launches: int
    held_micro_usd: int
    actual_micro_usd: int


def totals(entries: Sequence[Entry], group: str) -> list[Total]:
    """Sums of entries by environment, batch, family, project or day, in order of the first launch. Pure."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(by_day(entry) if group == "day" else str(getattr(entry, group)), []).append(entry)
    return [
        Total(
            group=name,
            launches=len(found),
            held_micro_usd=sum(one.held_micro_usd for one in found if one.actual_micro_usd is None),
            actual_micro_usd=sum(one.actual_micro_usd or 0 for one in found),
        )
        for name, found in groups.items()
    ]
