"""What an operator reads of a batch."""

from __future__ import annotations

import contextlib
import io
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from provisioner.base.clock import now
from provisioner.batch.live_status import LiveStatus, RunProgress
from provisioner.batch.queue import RunState
from provisioner.batch.records import Batch
from provisioner.batch.results import Row
from provisioner.cli.commands.batch import view as module
from provisioner.cli.commands.batch.view import (
    RUNS_NAMED,
    SAID_CHARACTERS,
    BatchView,
    last_said,
    row_line,
    summary,
)
from tests.unit.batch import samples
from tests.unit.batch.samples import run, suite
from tests.unit.fakes.clock import WaitingClock

BEGIN = datetime(2026, 1, 2, tzinfo=UTC)
KEYS = [f"fam/main/guess/{number}" for number in range(1, 5)]


def row(number: int, **changes: object) -> Row:
    values = {
        "key": KEYS[number], "family": "fam", "task": "main", "agent": "guess", "repetition": number,
        "outcome": "scored", "score": 0.5, "cost_micro_usd": 20_000, "started_at": BEGIN,
        "ended_at": BEGIN + timedelta(seconds=90),
    }  # fmt: skip
    return Row.model_validate(values | changes)


def batch(cloud: str = "aws") -> Batch:
    runs = (run("guess", number) for number in range(1, 5))
    return samples.batch(*runs, id="s-1", suite=suite(cloud=cloud, budget=5))


def test_the_summary_counts_and_says_what_it_costs() -> None:
    states = {key: RunState(key=key, state="queued") for key in KEYS}
    states[KEYS[0]] = RunState(key=KEYS[0], state="done")
    states[KEYS[1]] = RunState(key=KEYS[1], state="running")
    assert summary(batch(), states, [row(0, outcome="agent_failed")], (100_000, 20_000)) == [
        "1/4 ended (1 failed), 1 running, 2 queued",
        "0.0200 USD spent + 0.1000 USD reserved of 5 USD",
    ]
    # An agent that ran out of time may have left something that was scored.
    late = [row(0, outcome="timed_out"), row(1, outcome="timed_out", score=None)]
    assert summary(batch(), states, late, (0, 0))[0] == (
        "2/4 ended (1 failed, 1 timed out with a score), 1 running, 1 queued"
    )


def test_costs_are_left_out_where_machines_cost_nothing() -> None:
    local, running = batch("local"), {KEYS[0]: RunState(key=KEYS[0], state="running")}
    told = summary(local, running, [], (0, 0))
    assert told == ["0/4 ended (0 failed), 1 running, 3 queued"]
    costs = "0.0000 USD spent + 0.0000 USD reserved of 5 USD"
    assert summary(batch(), running, [], (0, 0)) == [told[0], costs]
    all_ended = summary(local, {}, [row(number) for number in range(4)], (0, 0))
    assert all_ended == ["4/4 ended (0 failed), 0 running, 0 queued"]
    assert row_line(local.suite, row(0, cost_micro_usd=0)) == "fam/main/guess/1: scored 0.5 (1m30s)"
    assert row_line(local.suite, row(0, cost_micro_usd=0, started_at=None)) == "fam/main/guess/1: scored 0.5"
    spot = row_line(batch().suite, row(0, cost_micro_usd=0))
    assert spot == "fam/main/guess/1: scored 0.5 (1m30s, 0.0000 USD)"


def test_a_row_is_one_line() -> None:
    suite = batch().suite
    assert row_line(suite, row(0)) == "fam/main/guess/1: scored 0.5 (1m30s, 0.0200 USD)"
    said = row_line(suite, row(1, outcome="infrastructure_failed", score=None, attempts=3, message="No SSH."))
    assert said == "fam/main/guess/2: infrastructure failed (1m30s, 0.0200 USD, attempt 3): No SSH."
    failed = row_line(suite, row(0, outcome="agent_failed", score=0.0))
    assert failed == "fam/main/guess/1: the agent failed, score 0 (1m30s, 0.0200 USD)"
    late = row_line(suite, row(0, outcome="timed_out"))
    assert late == "fam/main/guess/1: timed out with a score 0.5 (1m30s, 0.0200 USD)"


def test_piped_each_run_begins_and_ends_with_a_plain_line() -> None:
    text = io.StringIO()
    view = BatchView(Console(file=text, width=200), batch())
    live_status = LiveStatus()
    with live_status.track(f"s-1/{KEYS[0]}") as running:
        view.show({}, [], live_status.active_runs(), [(running.key, "Clearing away \x1b[31m")], (0, 0))
        running.attempt = 2
        view.show({}, [], live_status.active_runs(), [], (0, 0))
    view.show({}, [row(0)], [], [], (0, 0))
    view.show({}, [row(0)], [], [], (0, 0))
    view.stop()
    lines = [line.partition(" ")[2] for line in text.getvalue().splitlines()]
    assert all(datetime.strptime(line[:8], "%H:%M:%S") for line in text.getvalue().splitlines())
    assert lines == [
        "fam/main/guess/1: Clearing away ",
        "fam/main/guess/1: begins",
        "fam/main/guess/1: begins again (attempt 2)",
        "[1/4] fam/main/guess/1: scored 0.5 (1m30s, 0.0200 USD)",
    ]


def test_piped_a_line_says_what_the_runs_do_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    at, clock = BEGIN, WaitingClock()
    monkeypatch.setattr(module, "now", lambda: at + timedelta(seconds=clock.seconds))
    monkeypatch.setattr(module, "time", clock)
    view = BatchView(Console(file=text, width=200), batch())
    live_status = LiveStatus()
    states = {KEYS[0]: RunState(key=KEYS[0], state="running", started_at=BEGIN - timedelta(minutes=3))}
    with contextlib.ExitStack() as runs:
        first = runs.enter_context(live_status.track(f"s-1/{KEYS[0]}"))
        first.phase = "agent"
        for _ in range(2):
            view.show(states, [], live_status.active_runs(), [], (0, 0))
        for number in range(RUNS_NAMED):
            runs.enter_context(live_status.track(f"s-1/other/{number}"))
        for seconds in (59, 60, 61):
            clock.seconds = seconds
            view.show(states, [], live_status.active_runs()[:1], [], (0, 0))
        at += timedelta(hours=1)  # the system's clock is set, and the next line is not late for it
        view.show(states, [], live_status.active_runs(), [], (0, 0))
        clock.sleep(60)
        view.show(states, [], live_status.active_runs(), [], (0, 0))
        clock.sleep(60)
        view.show(states, [], [], [], (0, 0))
        view.show(states, [row(0)], [], [], (0, 0))
    lines = text.getvalue().splitlines()
    progress = "0/4 ended (0 failed), 1 running, 3 queued"
    assert lines[:2] == [f"00:00:00 {KEYS[0]}: begins", f"00:01:00 {progress}; {KEYS[0]}: agent, running for 4m"]
    assert lines[-3] == (
        f"01:02:01 {progress}; {KEYS[0]}: agent, running for 1h5m1s; other/0: queued; other/1: queued; "
        "other/2: queued; other/3: queued; and 1 more"
    )
    assert lines[-2] == f"01:03:01 {progress}"
    assert len(lines) == 3 + RUNS_NAMED + 2


def test_on_a_terminal_it_is_a_live_picture() -> None:
    text = io.StringIO()
    view = BatchView(Console(file=text, force_terminal=True, width=120), batch())
    live_status = LiveStatus()
    with live_status.track(f"s-1/{KEYS[0]}") as running:
        progress = RunProgress(live_status, running)
        progress.output("of the phase before\n")
        progress.phase_started("agent")
        for piece in ("one\ntw", "o \x1b[31m\n", "\n "):
            progress.output(piece)
        view.show(
            {KEYS[0]: RunState(key=KEYS[0], state="running", started_at=now() - timedelta(minutes=3))},
            [row(1, outcome="timed_out", score=None), row(2, outcome="timed_out")],
            live_status.active_runs(),
            [],
            (0, 0),
        )
        view.stop()
    [line] = [line for line in text.getvalue().splitlines() if line.startswith(KEYS[0])]
    assert line.split() == [KEYS[0], "agent", "3m", "two"]
    assert "1 the agent ran out of time" in text.getvalue()
    assert "1 timed out with a score" in text.getvalue()


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("", ""),
        (" \n\n", ""),
        ("one\ntwo", "two"),
        ("10 %\r20 %\r", "20 %"),
        ("x" * 1000, "x" * (SAID_CHARACTERS - 6) + " [...]"),
    ],
)
def test_the_last_line_that_says_something_is_shown(output: str, said: str) -> None:
    assert last_said(output) == said
