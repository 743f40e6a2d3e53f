"""Shows a batch while it runs: a live table on a terminal, plain lines when piped. On stderr, as all progress."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from provisioner.batch.engine import RunState
from provisioner.batch.live_status import ActiveRun
from provisioner.batch.records import Batch
from provisioner.batch.report import OUTCOMES
from provisioner.batch.results import Row
from provisioner.cli.output import printable
from provisioner.costs.prices import MICRO, dollars
from provisioner.ttl import words

SHOWN_RUNNING = 20


def time_left(rows: Sequence[Row], to_do: int, concurrency: int) -> timedelta | None:
    """How long the rest will take, if it takes what the others took; None while none has ended. Pure."""
    lasted = [(row.ended_at - row.started_at).total_seconds() for row in rows if row.started_at and row.ended_at]
    if not lasted:
        return None
    rounds = -(-to_do // concurrency)
    return timedelta(seconds=round(rounds * sum(lasted) / len(lasted)))


def row_line(row: Row) -> str:
    """One line about a run that has ended."""
    score = "" if row.score is None else f" {row.score:g}"
    lasted = f"{words(row.ended_at - row.started_at)}, " if row.started_at and row.ended_at else ""
    cost = f"{row.cost_micro_usd / MICRO:.4f} USD"
    again = f", attempt {row.attempts}" if row.attempts > 1 else ""
    why = f": {row.message}" if row.message else ""
    return f"{row.key}: {OUTCOMES[row.outcome]}{score} ({lasted}{cost}{again}){why}"


def summary(batch: Batch, states: Mapping[str, RunState], rows: Sequence[Row], held: int, spent: int) -> str:
    """One line about the whole."""
    return ", ".join(_parts(batch, states, rows, held, spent))


def _parts(batch: Batch, states: Mapping[str, RunState], rows: Sequence[Row], held: int, spent: int) -> list[str]:
    """How far it has come in three parts, what it costs, and how long it will take."""
    counts = Counter(one.state for one in states.values())
    running = counts["running"]
    queued = len(batch.runs) - len(rows) - running
    failed = sum(row.outcome != "scored" for row in rows)
    budget = f" of {batch.suite.budget} USD" if batch.suite.budget is not None else ""
    parts = [
        f"{len(rows)}/{len(batch.runs)} ended ({failed} failed)",
        f"{running} running",
        f"{queued} queued",
        f"{dollars(spent)} spent + {dollars(held)} held{budget}",
    ]
    if queued + running:
        left = time_left(rows, queued + running, batch.suite.concurrency)
        parts.append(f"about {words(left)} left" if left else "time left not known yet")
    return parts


class BatchView:
    """What an operator sees of a batch.

    Args:
        console: on stderr.
    """

    def __init__(self, console: Console, batch: Batch) -> None:
        self._console = console
        self._batch = batch
        self._begin = time.monotonic()
        self._seen: set[str] = set()
        self._began: dict[str, int] = {}
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        if self._live:
            self._live.start()

    def show(
        self,
        states: Mapping[str, RunState],
        rows: Sequence[Row],
        running: Sequence[ActiveRun],
        notes: Sequence[tuple[str, str]],
        money: tuple[int, int],
    ) -> None:
        """Shows how things stand.

        Args:
            running: what this process works on.
            notes: new lines, as (run, text).
            money: held and spent, in millionths of a US dollar.
        """
        for key, text in notes:
            self._line(f"{key.partition('/')[2]}: {text}")
        for one in running:
            if self._began.get(one.key, 0) < one.attempt:
                self._began[one.key] = one.attempt
                again = f" again (attempt {one.attempt})" if one.attempt > 1 else ""
                self._line(f"{one.key.partition('/')[2]}: begins{again}")
        fresh = [row for row in rows if row.key not in self._seen]
        for row in fresh:
            self._seen.add(row.key)
            self._line(f"[{len(self._seen)}/{len(self._batch.runs)}] {row_line(row)}")
        if self._live:
            self._live.update(self._picture(states, rows, running, money))

    def note(self, text: str) -> None:
        """Shows one line."""
        self._line(text)

    def stop(self) -> None:
        """Takes the table off the terminal."""
        if self._live:
            self._live.stop()
            self._live = None

    def _line(self, text: str) -> None:
        shown = escape(printable(text))
        self._console.print(f"[dim]{time.monotonic() - self._begin:6.1f}s[/] {shown}")

    def _picture(
        self,
        states: Mapping[str, RunState],
        rows: Sequence[Row],
        running: Sequence[ActiveRun],
        money: tuple[int, int],
    ) -> Group:
        table = Table.grid(padding=(0, 2))
        now = time.monotonic()
        for one in running[:SHOWN_RUNNING]:
            table.add_row(
                Text(one.key.partition("/")[2]), Text(one.phase), Text(words(timedelta(seconds=now - one.since)))
            )
        if len(running) > SHOWN_RUNNING:
            table.add_row(Text(f"and {len(running) - SHOWN_RUNNING} more"))
        bad = Counter(OUTCOMES[row.outcome] for row in rows if row.outcome != "scored")
        failures = ", ".join(f"{count} {what}" for what, count in bad.items())
        parts = _parts(self._batch, states, rows, *money)
        heads = (f"{self._batch.id}: {', '.join(parts[:3])}", ", ".join(parts[3:]))
        lines: list[Text | Table] = [*(Text(head, style="bold") for head in heads), table]
        if failures:
            lines.append(Text(failures, style="red"))
        return Group(*lines)
