"""Shows a batch while it runs, on stderr: a live table on a terminal, or else plain lines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from provisioner.base.clock import format_duration, now
from provisioner.base.printable import beginning, printable, printable_lines
from provisioner.batch.live_status import ActiveRun
from provisioner.batch.queue import RunState
from provisioner.batch.records import Batch
from provisioner.batch.results import OUTCOMES, Row
from provisioner.batch.suite import Suite
from provisioner.costs.prices import MICRO, dollars

MAX_RUNS_SHOWN = 20
# Of the last line that a run's machines have said.
SAID_CHARACTERS = 200
# How long there may be no new line where there is no live table. Then one says how far the batch is.
SILENCE_SECONDS = 60.0
RUNS_NAMED = 5


def outcome_words(row: Row) -> str:
    """Names how a run ended. An agent that ran out of time may have left something that was scored."""
    return "timed out with a score" if _is_scored_late(row) else OUTCOMES[row.outcome]


def _is_scored_late(row: Row) -> bool:
    return row.outcome == "timed_out" and row.score is not None


def row_line(suite: Suite, row: Row) -> str:
    """Returns one line about a run that has ended, with its costs where machines cost anything."""
    is_told = row.outcome == "scored" or _is_scored_late(row)
    score = "" if row.score is None else f"{'' if is_told else ', score'} {row.score:g}"
    facts = [
        format_duration(row.ended_at - row.started_at) if row.started_at and row.ended_at else "",
        f"{row.cost_micro_usd / MICRO:.4f} USD" if suite.is_billed else "",
        f"attempt {row.attempts}" if row.attempts > 1 else "",
    ]
    details = f" ({', '.join(filter(None, facts))})" if any(facts) else ""
    message = f": {row.message}" if row.message else ""
    return f"{row.key}: {outcome_words(row)}{score}{details}{message}"


def summary(batch: Batch, states: Mapping[str, RunState], rows: Sequence[Row], costs: tuple[int, int]) -> list[str]:
    """Describes the whole batch in one or two lines: how far it has come, and what it costs.

    Omits costs for the local cloud.

    Args:
        costs: what is reserved and what is spent, each in millionths of a US dollar.
    """
    running = sum(state.state == "running" for state in states.values())
    queued = len(batch.runs) - len(rows) - running
    late = sum(map(_is_scored_late, rows))
    failed = sum(row.outcome != "scored" for row in rows) - late
    how = f"{failed} failed" + (f", {late} timed out with a score" if late else "")
    progress = f"{len(rows)}/{len(batch.runs)} ended ({how}), {running} running, {queued} queued"
    reserved, spent = costs
    budget = f" of {batch.suite.budget} USD" if batch.suite.budget is not None else ""
    rest = [f"{dollars(spent)} spent + {dollars(reserved)} reserved{budget}"] if batch.suite.is_billed else []
    return [progress, *rest]


class BatchView:
    """The display of one batch. All times of day are UTC, as in records and logs.

    Args:
        console: the console on stderr.
    """

    def __init__(self, console: Console, batch: Batch) -> None:
        self._console = console
        self._batch = batch
        self._ended: set[str] = set()
        self._attempts: dict[str, int] = {}
        self._noted_at = time.monotonic()
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
        """Prints what is new, and updates the live table. Without one, prints the progress after a minute of silence.

        Args:
            states: the states of the batch's runs, by key.
            rows: of the runs that have ended.
            active_runs: those that are being worked on, as far as this process knows.
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
                self.note(f"[{len(self._ended)}/{len(self._batch.runs)}] {row_line(self._batch.suite, row)}")
        if self._live:
            self._live.update(self._table(states, rows, active_runs, costs))
        elif time.monotonic() - self._noted_at >= SILENCE_SECONDS:
            progress, *_ = summary(self._batch, states, rows, costs)
            self.note("; ".join([progress, *_doing(states, active_runs)]))

    def note(self, text: str) -> None:
        """Prints one line."""
        self._noted_at = time.monotonic()
        self._console.print(Text.assemble((f"{now():%H:%M:%S}", "dim"), " ", printable(text)))

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
        for column in ("key", "phase", "duration", "said"):
            table.add_column(no_wrap=True, overflow="ellipsis", ratio=1 if column == "said" else None)
        for active_run in active_runs[:MAX_RUNS_SHOWN]:
            key, duration = _without_batch(active_run.key), _duration(states, active_run)
            shown = (printable(key), printable(active_run.phase), duration, last_said(active_run.output))
            table.add_row(*map(Text, shown))
        if len(active_runs) > MAX_RUNS_SHOWN:
            table.add_row(Text(f"and {len(active_runs) - MAX_RUNS_SHOWN} more"))
        progress, *rest = summary(self._batch, states, rows, costs)
        heads = (f"{self._batch.id}: {progress}", *rest)
        words = Counter(outcome_words(row) for row in rows if row.outcome != "scored")
        failures = ", ".join(f"{count} {outcome}" for outcome, count in words.items())
        red = [Text(failures, style="red")] if failures else []
        return Group(*(Text(head, style="bold") for head in heads), table, *red)


def last_said(output: str) -> str:
    """Returns the last line of a machine's output that is not blank, made printable and bounded."""
    said = [line for line in printable_lines(output).splitlines() if line.strip()]
    return beginning(said[-1].strip(), SAID_CHARACTERS) if said else ""


def _doing(states: Mapping[str, RunState], active_runs: Sequence[ActiveRun]) -> list[str]:
    """Returns what each of the first active runs is doing, and for how long it has been running."""
    parts = []
    for active_run in active_runs[:RUNS_NAMED]:
        duration = _duration(states, active_run)
        running = f", running for {duration}" if duration else ""
        parts.append(f"{_without_batch(active_run.key)}: {active_run.phase}{running}")
    if len(active_runs) > RUNS_NAMED:
        parts.append(f"and {len(active_runs) - RUNS_NAMED} more")
    return parts


def _duration(states: Mapping[str, RunState], active_run: ActiveRun) -> str:
    state = states.get(_without_batch(active_run.key))
    return format_duration(now() - state.started_at) if state and state.started_at else ""


def _without_batch(key: str) -> str:
    """Returns a run's key without the batch's id in front."""
    return key.partition("/")[2]
