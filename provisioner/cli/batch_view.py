"""Shows a batch while it runs, on stderr: a live table on a terminal, or else plain lines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from provisioner.batch.engine import RunState
from provisioner.batch.live_status import ActiveRun
from provisioner.batch.records import Batch
from provisioner.batch.report import OUTCOMES
from provisioner.batch.results import Row
from provisioner.costs.prices import MICRO, dollars
from provisioner.printable import printable
from provisioner.ttl import words

MAX_RUNS_SHOWN = 20


def time_left(rows: Sequence[Row], remaining: int, active: int) -> timedelta | None:
    """Estimates how long the remaining runs will take, from the mean duration of those that have ended.

    Args:
        rows: of the runs that have ended; None is returned if none of them has a duration, or if they make no sense.
        remaining: how many runs remain.
        active: how many of them are active at once.
    """
    durations = [(row.ended_at - row.started_at).total_seconds() for row in rows if row.started_at and row.ended_at]
    if not durations:
        return None
    rounds = -(-remaining // active)
    try:
        return timedelta(seconds=round(rounds * sum(durations) / len(durations)))
    except OverflowError:  # rows in a shared queue may claim to have lasted for millennia
        return None


def row_line(row: Row) -> str:
    """Returns one line about a run that has ended."""
    score = "" if row.score is None else f" {row.score:g}"
    duration = f"{words(row.ended_at - row.started_at)}, " if row.started_at and row.ended_at else ""
    cost = f"{row.cost_micro_usd / MICRO:.4f} USD"
    attempt = f", attempt {row.attempts}" if row.attempts > 1 else ""
    message = f": {row.message}" if row.message else ""
    return f"{row.key}: {OUTCOMES[row.outcome]}{score} ({duration}{cost}{attempt}){message}"


def summary(
    batch: Batch, states: Mapping[str, RunState], rows: Sequence[Row], costs: tuple[int, int]
) -> tuple[str, str]:
    """Describes the whole batch in two lines: how far it has come, and what it costs and how long it will take.

    Args:
        costs: what is reserved and what is spent, each in millionths of a US dollar.
    """
    running = sum(state.state == "running" for state in states.values())
    queued = len(batch.runs) - len(rows) - running
    failed = sum(row.outcome != "scored" for row in rows)
    progress = f"{len(rows)}/{len(batch.runs)} ended ({failed} failed), {running} running, {queued} queued"
    reserved, spent = costs
    budget = f" of {batch.suite.budget} USD" if batch.suite.budget is not None else ""
    money = f"{dollars(spent)} spent + {dollars(reserved)} reserved{budget}"
    if not queued + running:
        return progress, money
    # A run's duration has its wait in it, so all that are up count.
    left = time_left(rows, queued + running, batch.suite.environments)
    return progress, f"{money}, {f'about {words(left)} left' if left else 'time left not known yet'}"


class BatchView:
    """The display of one batch.

    Args:
        console: the console on stderr.
    """

    def __init__(self, console: Console, batch: Batch) -> None:
        self._console = console
        self._batch = batch
        self._begin = time.monotonic()
        self._ended: set[str] = set()
        self._attempts: dict[str, int] = {}
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        if self._live:
            self._live.start()

    def show(
        self,
        states: Mapping[str, RunState],
        rows: Sequence[Row],
        active_runs: Sequence[ActiveRun],
        notes: Sequence[tuple[str, str]],
        costs: tuple[int, int],
    ) -> None:
        """Prints what is new, and updates the live table.

        Args:
            states: the states of the batch's runs, by key.
            rows: of the runs that have ended.
            active_runs: those that this process is working on.
            notes: new lines, as pairs of the run's key and the text.
            costs: what is reserved and what is spent, each in millionths of a US dollar.
        """
        for key, text in notes:
            self.note(f"{_without_batch(key)}: {text}")
        for active_run in active_runs:
            if self._attempts.get(active_run.key, 0) < active_run.attempt:
                self._attempts[active_run.key] = active_run.attempt
                again = f" again (attempt {active_run.attempt})" if active_run.attempt > 1 else ""
                self.note(f"{_without_batch(active_run.key)}: begins{again}")
        for row in rows:
            if row.key not in self._ended:
                self._ended.add(row.key)
                self.note(f"[{len(self._ended)}/{len(self._batch.runs)}] {row_line(row)}")
        if self._live:
            self._live.update(self._table(states, rows, active_runs, costs))

    def note(self, text: str) -> None:
        """Prints one line."""
        seconds = f"{time.monotonic() - self._begin:6.1f}s"
        self._console.print(Text.assemble((seconds, "dim"), " ", printable(text)))

    def stop(self) -> None:
        """Removes the live table from the terminal."""
        if self._live:
            self._live.stop()
            self._live = None

    def _table(
        self,
        states: Mapping[str, RunState],
        rows: Sequence[Row],
        active_runs: Sequence[ActiveRun],
        costs: tuple[int, int],
    ) -> Group:
        """Returns the live table: the summary, the active runs, and how many runs failed in which way."""
        table = Table.grid(padding=(0, 2))
        now = time.monotonic()
        for active_run in active_runs[:MAX_RUNS_SHOWN]:
            duration = words(timedelta(seconds=now - active_run.since))
            key, phase = printable(_without_batch(active_run.key)), printable(active_run.phase)
            table.add_row(Text(key), Text(phase), Text(duration))
        if len(active_runs) > MAX_RUNS_SHOWN:
            table.add_row(Text(f"and {len(active_runs) - MAX_RUNS_SHOWN} more"))
        failures = Counter(OUTCOMES[row.outcome] for row in rows if row.outcome != "scored")
        progress, money = summary(self._batch, states, rows, costs)
        heads = (f"{self._batch.id}: {progress}", money)
        lines: list[Text | Table] = [*(Text(head, style="bold") for head in heads), table]
        if failures:
            text = ", ".join(f"{count} {outcome}" for outcome, count in failures.items())
            lines.append(Text(text, style="red"))
        return Group(*lines)


def _without_batch(key: str) -> str:
    """Returns a run's key without the batch's id in front."""
    return key.partition("/")[2]
