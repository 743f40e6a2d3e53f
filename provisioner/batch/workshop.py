"""A process that works on batches: its engine, its runs, and how they come to their ends."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from provisioner.batch.attempts import Attempt, Step
from provisioner.batch.bench import Bench
from provisioner.batch.board import Board
from provisioner.batch.conduct import Do, conduct
from provisioner.batch.engine import Engine, Json, Register, RunState, postgres_url, sqlite_url
from provisioner.batch.launcher import Launcher, host_slots
from provisioner.batch.presence import Presence
from provisioner.batch.records import Batch, Batches, Order
from provisioner.batch.results import Row
from provisioner.batch.suite import Run
from provisioner.errors import InfrastructureError, ProvisionerError
from provisioner.paths import Home
from provisioner.settings import Settings
from provisioner.version import __version__

LOOK_SECONDS = 0.5
# How long runs may take to clear away when they are told to stop: the interrupt ladder, and a destroy.
CLEARING_SECONDS = 300.0


def register_of(home: Home, batch: Batch, database: str) -> Register:
    """The queue of a batch."""
    return Register(engine_url(home, batch.id, database))


def engine_url(home: Home, batch: str, database: str) -> str:
    """The database of a batch's engine: its own file, or the one that workers share."""
    return postgres_url(database) if database else sqlite_url(str(Batches(home).directory(batch) / "engine.sqlite"))


class Workshop:
    """Works on the runs of a queue until it is closed.

    Args:
        database: that workers share, as a URL; empty: the file of one batch.
        batch: the id of the batch whose file it is; empty for a worker on a shared database.
    """

    def __init__(self, home: Home, settings: Settings, *, database: str = "", batch: str = "") -> None:
        self.board = Board()
        self._home = home
        self._settings = settings
        self._database = database
        self._benches: dict[str, Bench] = {}
        self._launcher = Launcher("batch", host_slots())
        # The file's lock says that there is one controller; what the last one had begun is this one's.
        worker = f"{socket.gethostname()}-{secrets.token_hex(4)}" if database else "controller"
        self._presence = Presence(database, worker) if database else None
        url = engine_url(home, batch, database)
        self._engine = Engine(url, worker, self._work)
        self.register = Register(url)

    def add(self, batch: Batch, bench: Bench) -> None:
        """Queues all runs of a batch."""
        self._benches[batch.id] = bench
        directory = str(Path(batch.suite_file).parent)
        orders = {
            run.key: Order(batch=batch.id, suite=batch.suite, directory=directory, run=run).model_dump(mode="json")
            for run in batch.runs
        }
        self.register.add(batch.id, batch.suite.concurrency, orders)

    def look(self, batches: Sequence[str]) -> dict[str, dict[str, RunState]]:
        """How far batches have come. Tells runs to stop that were cancelled, and takes over from dead workers.

        Raises:
            InfrastructureError: the database cannot be asked.
        """
        states = {batch: self.register.states(batch) for batch in batches}
        for batch, found in states.items():
            for one in found.values():
                if one.state == "cancelled":
                    self.board.stop(f"{batch}/{one.key}")
        if self._presence and (dead := self._presence.dead(self.register.executors())):
            self._engine.recover(dead)
        return states

    def stop(self, hand_back: bool = False) -> None:
        """Stops all runs that are worked on here and waits until they have cleared away.

        Args:
            hand_back: queue them again, for other workers.
        """
        mine: dict[str, list[str]] = {}
        for running in self.board.running():
            batch, _, key = running.key.partition("/")
            mine.setdefault(batch, []).append(key)
        # Cancelled first: a step that ends now is not the beginning of the next one.
        with contextlib.suppress(InfrastructureError):  # a database that is lost hears of it no more
            for batch, keys in mine.items():
                self.register.cancel(batch, keys)
        self.board.stop_all()
        deadline = time.monotonic() + CLEARING_SECONDS
        while self.board.running() and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        if hand_back:
            with contextlib.suppress(InfrastructureError):
                for batch, keys in mine.items():
                    self.register.resume(batch, keys)

    def close(self) -> None:
        """Ends engine and connections."""
        self._engine.close()
        self.register.close()
        if self._presence:
            self._presence.close()

    def _work(self, given: Json, do: Do[Step]) -> Json:
        order = Order.model_validate(given)
        attempts: list[Attempt] = []
        with self.board.working(f"{order.batch}/{order.run.key}") as running:

            def attempt(number: int, shortages: int) -> Attempt:
                made = bench.attempt(order.run, number, shortages, self.board, running, self._launcher)
                attempts.append(made)
                return made

            try:
                bench = self._bench(order)
                row = conduct(order.run, order.suite.retries, attempt, bench.costs_of, do, __version__)
            except ProvisionerError as error:
                row = broken(order.run, error.message)
            except BaseException:
                # Cancelled, within a step or between two: no further step is done, and nothing may stay.
                if attempts:
                    attempts[-1].end()
                raise
            return row.model_dump(mode="json")

    def _bench(self, order: Order) -> Bench:
        bench = self._benches.get(order.batch)
        if bench is None:
            bench = Bench(
                self._home, self._settings, order.suite, Path(order.directory), order.batch, database=self._database
            )
            self._benches[order.batch] = bench
        return bench


def rows_of(
    batch: Batch,
    states: Mapping[str, RunState],
    known: dict[str, Row],
    outputs: Callable[[Sequence[str]], Mapping[str, Json | str]],
) -> list[Row]:
    """One row for each run that has ended, in the suite's order.

    Args:
        known: rows that were read before; those that are new are added.
        outputs: what ended runs came to, by key.
    """
    by_key = {run.key: run for run in batch.runs}
    ended = [key for key, one in states.items() if one.state in ("done", "broken") and key not in known]
    for key, output in outputs(ended).items():
        known[key] = broken(by_key[key], str(output)) if isinstance(output, str) else Row.model_validate(output)
    rows = []
    for run in batch.runs:
        state = states.get(run.key)
        if state and state.state == "cancelled":
            rows.append(cancelled(run))
        elif run.key in known:
            rows.append(known[run.key])
    return rows


def broken(run: Run, why: str) -> Row:
    """The row of a run that could not be worked on."""
    return _row(run, "infrastructure_failed", why[:500])


def cancelled(run: Run) -> Row:
    """The row of a run that was cancelled."""
    return _row(run, "cancelled", "")


def _row(run: Run, outcome: str, message: str) -> Row:
    return Row.model_validate(
        {
            "key": run.key, "family": run.key.split("/")[0], "task": run.task, "agent": run.agent,
            "repetition": run.repetition, "outcome": outcome, "message": message, "attempts": 0,
            "version": __version__,
        }
    )  # fmt: skip
