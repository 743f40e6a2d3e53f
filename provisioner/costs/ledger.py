"""Keeps the ledger: the worst-case and actual cost of every launch, for any number of controllers.

A launch reserves its worst-case cost before anything is created. It is settled at its actual cost once the cloud has
confirmed the end. One transaction checks and records a reservation and locks out all other writers, so that no two
controllers can reserve the same money.
"""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from decimal import Decimal
from math import ceil
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from provisioner.base.config import Settings
from provisioner.base.errors import BudgetError, InfrastructureError
from provisioner.base.models import Record
from provisioner.costs.prices import dollars, micro_usd

# A reservation takes a millisecond, but on a busy host its writer may have to wait.
BUSY_SECONDS = 60.0
SCHEMA_VERSION = 2
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
    reserved_micro_usd INTEGER NOT NULL CHECK (reserved_micro_usd >= 0),
    ended_at TEXT,
    actual_micro_usd INTEGER CHECK (actual_micro_usd >= 0)
"""

# A row for each settled launch whose traffic the cloud has not shown completely.
TRAFFIC_TABLE = "CREATE TABLE IF NOT EXISTS traffic (environment TEXT PRIMARY KEY, told TEXT NOT NULL)"

Scope = Literal["command", "project", "month"]
# The entries that count against each kind of budget.
_COUNTS: dict[Scope, str] = {
    "command": "command = :of",
    "project": "project = :of",
    "month": "substr(launched_at, 1, 7) = :of",
}


_SUMS = (
    "SELECT coalesce(sum(actual_micro_usd), 0) AS spent, "
    "coalesce(sum(CASE WHEN actual_micro_usd IS NULL THEN reserved_micro_usd ELSE 0 END), 0) AS held "
    "FROM entries WHERE environment != :environment"
)


class Budget(Record):
    """A budget: a sum that launches may not exceed.

    Args:
        scope: the launches that count: those of a command, of a project, or of a calendar month (UTC).
        of: the command's id, the project's name, or the month, such as 2026-01.
        micro_usd: the sum, in millionths of a US dollar.
        name: the name that messages use for it, such as "the budget given".
    """

    scope: Scope
    of: str
    micro_usd: int
    name: str


class Entry(Record):
    """One launch: a task's environment or an image's builder.

    Args:
        command: the id of the command that launched it.
        reserved_micro_usd: the reserved worst-case cost, in millionths of a US dollar.
        ended_at: its end; None until it is settled.
        actual_micro_usd: its actual cost, in millionths of a US dollar; None until it is settled.
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
    reserved_micro_usd: int
    ended_at: datetime | None = None
    actual_micro_usd: int | None = None

    @property
    def counted_micro_usd(self) -> int:
        """The amount that counts against budgets: the actual cost once it is settled, the reservation until then."""
        return self.reserved_micro_usd if self.actual_micro_usd is None else self.actual_micro_usd


class Traffic(Record):
    """What a settled launch sent, of which the cloud does not show all yet.

    Args:
        instances: the cloud's ids of its machines.
        launched_at: since when they may have sent something.
        counted_micro_usd: what the launch's actual cost contains for it, in millionths of a US dollar.
    """

    environment: str
    cloud: str
    region: str
    instances: tuple[str, ...]
    launched_at: datetime
    ended_at: datetime
    usd_per_gb: Decimal
    counted_micro_usd: int


class LatestEnds(Record):
    """The latest ends of unsettled launches: of those that hold a reservation, and of those on one cloud."""

    paid: datetime | None = None
    on_cloud: datetime | None = None


class Connection(Protocol):
    """The database connection that the ledger needs: parameters are written as :name, columns are read by name."""

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""

    def execute(self, sql: str, values: dict[str, Any] = ..., /) -> Any:
        """Runs one statement and returns a cursor with fetchone() and fetchall()."""


class Ledger:
    """A ledger in a SQLite file, which the first reservation creates with mode 0600.

    Args:
        path: the file; its directory must exist when the file is created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def reserve(self, entry: Entry, budgets: Iterable[Budget] = ()) -> None:
        """Reserves a launch's worst-case cost if it fits every budget. Replaces the environment's earlier reservation.

        Raises:
            BudgetError: it does not fit; nothing was reserved.
        """
        with self._writing() as connection:
            _require_room(connection, entry, budgets)
            values = entry.model_dump(mode="json")
            columns, marks = ", ".join(values), ", ".join(f":{name}" for name in values)
            changes = ", ".join(f"{name} = excluded.{name}" for name in values)
            # The column names are the model's fields.
            connection.execute(
                f"INSERT INTO entries ({columns}) VALUES ({marks}) ON CONFLICT (environment) DO UPDATE SET {changes}",  # noqa: S608
                values,
            )

    def extend(
        self,
        environment: str,
        expires_at: datetime,
        reserved_micro_usd: int,
        budgets: Callable[[Entry], Iterable[Budget]] = lambda _: (),
    ) -> None:
        """Increases an unsettled reservation if that fits every budget. Does nothing if there is none.

        Args:
            budgets: returns the budgets that apply to an entry.

        Raises:
            BudgetError: it does not fit; the reservation is unchanged.
        """
        with self._writing() as connection:
            row = connection.execute(
                "SELECT * FROM entries WHERE environment = :environment AND actual_micro_usd IS NULL",
                {"environment": environment},
            ).fetchone()
            if row is None:
                return
            entry = Entry.model_validate(dict(row))
            changed = entry.model_copy(update={"expires_at": expires_at, "reserved_micro_usd": reserved_micro_usd})
            _require_room(connection, changed, budgets(changed))
            connection.execute(
                "UPDATE entries SET expires_at = :expires_at, reserved_micro_usd = :reserved_micro_usd "
                "WHERE environment = :environment",
                changed.model_dump(mode="json", include={"expires_at", "reserved_micro_usd", "environment"}),
            )

    def settle(
        self, environment: str, ended_at: datetime, actual_micro_usd: int, traffic: Traffic | None = None
    ) -> None:
        """Replaces a reservation by the actual cost. Does nothing if it is settled already or does not exist.

        Args:
            traffic: what is still to be counted of it, by `count_traffic`.
        """
        if not self._exists():
            return
        with self._writing() as connection:
            changed = connection.execute(
                "UPDATE entries SET ended_at = :ended_at, actual_micro_usd = :actual "
                "WHERE environment = :environment AND actual_micro_usd IS NULL",
                {"ended_at": ended_at.isoformat(), "actual": actual_micro_usd, "environment": environment},
            )
            if traffic and changed.rowcount:
                connection.execute(TRAFFIC_TABLE)
                connection.execute(
                    "INSERT INTO traffic (environment, told) VALUES (:environment, :told)",
                    {"environment": environment, "told": traffic.model_dump_json()},
                )

    def uncounted_traffic(self, cloud: str) -> list[Traffic]:
        """Returns the traffic of settled launches that is not counted for good."""
        if not self._exists():
            return []
        with self._writing() as connection:
            connection.execute(TRAFFIC_TABLE)
            rows = connection.execute("SELECT told FROM traffic").fetchall()
        known = [Traffic.model_validate_json(row["told"]) for row in rows]
        return [traffic for traffic in known if traffic.cloud == cloud]

    def count_traffic(self, environment: str, micro_usd: int, *, is_all: bool) -> None:
        """Counts what a settled launch has sent, in place of what was counted for it before.

        Args:
            micro_usd: its price, in millionths of a US dollar.
            is_all: whether the cloud has shown all of it.
        """
        with self._writing() as connection:
            key = {"environment": environment}
            row = connection.execute("SELECT told FROM traffic WHERE environment = :environment", key).fetchone()
            if row is None:  # another controller has counted it
                return
            traffic = Traffic.model_validate_json(row["told"])
            connection.execute(
                "UPDATE entries SET actual_micro_usd = actual_micro_usd + :more WHERE environment = :environment",
                {**key, "more": micro_usd - traffic.counted_micro_usd},
            )
            told = traffic.model_copy(update={"counted_micro_usd": micro_usd}).model_dump_json()
            if is_all:
                connection.execute("DELETE FROM traffic WHERE environment = :environment", key)
            else:
                connection.execute(
                    "UPDATE traffic SET told = :told WHERE environment = :environment", {**key, "told": told}
                )

    def settle_late(self, environment: str, ended_at: datetime) -> None:
        """Settles an environment that has no record any more at the share of its reservation that it lived for.

        It costs the whole reservation if it ended at its expiry or later, or before its launch by a clock set back.
        """
        for entry in self.entries(unsettled=True, environment=environment):
            if entry.launched_at <= ended_at < entry.expires_at:
                share = (ended_at - entry.launched_at) / (entry.expires_at - entry.launched_at)
                self.settle(environment, ended_at, ceil(entry.reserved_micro_usd * share))
            else:
                self.settle(environment, entry.expires_at, entry.reserved_micro_usd)

    def entries(self, *, unsettled: bool = False, batch: str = "", environment: str = "") -> list[Entry]:
        """Returns entries in order of launch: all, or those that are unsettled, of one batch, or of one environment."""
        if not self._exists():
            return []
        filters = [
            ("actual_micro_usd IS NULL", unsettled),
            ("batch = :batch", batch),
            ("environment = :environment", environment),
        ]
        only = " AND ".join(["1 = 1", *(condition for condition, applies in filters if applies)])
        with self._connection() as connection:
            rows = connection.execute(
                f"SELECT * FROM entries WHERE {only} ORDER BY launched_at, environment",  # noqa: S608 - no value in it
                {"batch": batch, "environment": environment},
            ).fetchall()
        return [Entry.model_validate(dict(row)) for row in rows]

    def mean_cost(self, cloud: str, family: str, task: str) -> tuple[int, int]:
        """Returns how many runs of a task this ledger has settled, and what one of them cost on average.

        Runs of which nothing was created, and which so cost nothing, do not count.

        Returns:
            the number, and millionths of a US dollar, rounded up; zeros if there are none.
        """
        if not self._exists():
            return 0, 0
        with self._connection() as connection:
            row = connection.execute(
                "SELECT count(*) AS runs, coalesce(sum(actual_micro_usd), 0) AS spent FROM entries "
                "WHERE kind = 'task' AND cloud = :cloud AND family = :family AND task = :task AND actual_micro_usd > 0",
                {"cloud": cloud, "family": family, "task": task},
            ).fetchone()
        runs = int(row["runs"])
        return runs, -(-int(row["spent"]) // max(1, runs))

    def latest_ends(self, cloud: str) -> LatestEnds:
        """Returns the latest ends of unsettled launches, to within a second, as they are compared as texts."""
        if not self._exists():
            return LatestEnds()
        with self._connection() as connection:
            row = connection.execute(
                "SELECT max(CASE WHEN reserved_micro_usd > 0 THEN expires_at END) AS paid, "
                "max(CASE WHEN cloud = :cloud THEN expires_at END) AS on_cloud "
                "FROM entries WHERE actual_micro_usd IS NULL",
                {"cloud": cloud},
            ).fetchone()
        return LatestEnds.model_validate(dict(row))

    def _exists(self) -> bool:
        return self._path.exists()

    def _begin(self, connection: Connection) -> None:
        """Begins a transaction that locks out all other writers."""
        connection.execute("BEGIN IMMEDIATE")

    def _create_table(self, connection: sqlite3.Connection) -> None:
        """Creates the table, in one step and once for all controllers."""
        connection.execute("BEGIN IMMEDIATE")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, SCHEMA_VERSION):
            raise InfrastructureError(
                f"The ledger {self._path} was written by another version of provisioner (schema {version})."
            )
        if version == 0:
            connection.execute(f"CREATE TABLE entries ({COLUMNS}) STRICT")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Connection]:
        with self._connection() as connection:
            self._begin(connection)
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # not after a Ctrl-C that came during COMMIT
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
                # A confirmed reservation must survive a power failure.
                connection.execute("PRAGMA synchronous = FULL")
                if connection.execute("PRAGMA user_version").fetchone()[0] != SCHEMA_VERSION:
                    self._create_table(connection)
                yield connection
        except (sqlite3.Error, OSError) as error:
            raise InfrastructureError(
                f"The ledger {self._path} cannot be used: {error}",
                hint="Nothing is launched without the ledger. Is the disk full, or the file damaged?",
            ) from error


def _require_room(connection: Connection, entry: Entry, budgets: Iterable[Budget]) -> None:
    """Requires that an entry fits all budgets together with the existing entries.

    Raises:
        BudgetError: it does not fit one of them; if there is one that it will never fit, of that.
    """
    refusals = [error for budget in budgets if (error := _refusal(connection, entry, budget))]
    if refusals:
        raise min(refusals, key=lambda error: error.may_fit_later)


def _refusal(connection: Connection, entry: Entry, budget: Budget) -> BudgetError | None:
    """Returns the error that says, with the arithmetic, that an entry does not fit a budget; None if it does."""
    sums = connection.execute(
        f"{_SUMS} AND {_COUNTS[budget.scope]}", {"of": budget.of, "environment": entry.environment}
    ).fetchone()
    spent, held = int(sums["spent"]), int(sums["held"])
    total = spent + held + entry.reserved_micro_usd
    if total <= budget.micro_usd:
        return None
    return BudgetError(
        f"{entry.environment} does not fit {budget.name}: {dollars(spent)} spent + {dollars(held)} reserved + "
        f"{dollars(entry.reserved_micro_usd)} for this launch at most = {dollars(total)}, "
        f"more than {dollars(budget.micro_usd)}.",
        hint="Give it a shorter time to live or a smaller machine, wait until others have ended, or raise the budget. "
        "`provisioner costs` shows all reservations.",
        settings=("ttl", "budget") if budget.scope == "command" else ("ttl",),
        may_fit_later=spent + entry.reserved_micro_usd <= budget.micro_usd,
    )


class Total(Record):
    """The reserved and actual cost of a group of entries, in millionths of a US dollar."""

    group: str
    launches: int
    reserved_micro_usd: int
    actual_micro_usd: int


def totals(entries: Sequence[Entry], group: str) -> list[Total]:
    """Sums entries by environment, batch, family, project or day (UTC), in order of the first launch. Pure."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        name = entry.launched_at.strftime("%Y-%m-%d") if group == "day" else str(getattr(entry, group))
        groups.setdefault(name, []).append(entry)
    return [
        Total(
            group=name,
            launches=len(members),
            reserved_micro_usd=sum(entry.reserved_micro_usd for entry in members if entry.actual_micro_usd is None),
            actual_micro_usd=sum(entry.actual_micro_usd or 0 for entry in members),
        )
        for name, members in groups.items()
    ]


class Spending(Record):
    """The names and budgets of a command's launches.

    Args:
        command: the command's own id.
        project: the project that the launches count under.
        batch: the batch that they belong to; empty for none.
        budget: US dollars for all launches of this command (--budget); None for no such budget.
        month: US dollars for all launches of a calendar month (UTC); None for no such budget.
        projects: US dollars for all launches of a project, by its name.
    """

    command: str = Field(default_factory=lambda: secrets.token_hex(8))
    project: str = "default"
    batch: str = ""
    budget: Decimal | None = None
    month: Decimal | None = None
    projects: dict[str, Decimal] = Field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings, budget: Decimal | None = None) -> Spending:
        """Returns the names and budgets that the operator's settings give."""
        standing = settings.budget
        return cls(project=settings.project, budget=budget, month=standing.month, projects=dict(standing.projects))

    def budgets(self, launched_at: datetime) -> list[Budget]:
        """Returns all budgets that a launch at this time must fit."""
        month = launched_at.strftime("%Y-%m")
        sums: list[tuple[Scope, str, Decimal | None, str]] = [
            ("command", self.command, self.budget, "the budget given"),
            ("project", self.project, self.projects.get(self.project), f"the budget of the project {self.project}"),
            ("month", month, self.month, f"the budget of {month}"),
        ]
        return [
            Budget(scope=scope, of=of, micro_usd=micro_usd(usd), name=name)
            for scope, of, usd, name in sums
            if usd is not None
        ]
