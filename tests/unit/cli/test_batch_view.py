"""What an operator reads of a batch."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from rich.console import Console

from provisioner.batch.engine import RunState
from provisioner.batch.live_status import LiveStatus
from provisioner.batch.records import Batch
from provisioner.batch.results import Row
from provisioner.batch.suite import FamilyEntry, Run, Submission, Suite
from provisioner.cli.batch_view import BatchView, row_line, summary, time_left

BEGIN = datetime(2026, 1, 2, tzinfo=UTC)
KEYS = [f"fam/main/guess/{number}" for number in range(1, 5)]


def row(number: int, **changes: object) -> Row:
    values = {
        "key": KEYS[number], "family": "fam", "task": "main", "agent": "guess", "repetition": number,
        "outcome": "scored", "score": 0.5, "cost_micro_usd": 20_000, "started_at": BEGIN,
        "ended_at": BEGIN + timedelta(seconds=90),
    }  # fmt: skip
    return Row.model_validate(values | changes)


def batch() -> Batch:
    suite = Suite(
        name="s", families=(FamilyEntry(path="fam"),), submissions=(Submission(name="guess", text="1"),),
        concurrency=2, budget=Decimal(5),
    )  # fmt: skip
    runs = tuple(Run(key=key, family="/fam", task="main", agent="guess", repetition=1) for key in KEYS)
    return Batch(id="s-1", suite=suite, suite_file="/s.yaml", shared=False, created_at=BEGIN, version="1", runs=runs)


def test_the_time_left_is_that_of_the_rounds_to_come() -> None:
    assert time_left([], 4, 2) is None
    assert time_left([row(0), row(1)], 3, 2) == timedelta(seconds=180)


def test_the_summary_counts_and_says_what_it_costs() -> None:
    states = {key: RunState(key=key, state="queued") for key in KEYS}
    states[KEYS[0]] = RunState(key=KEYS[0], state="done")
    states[KEYS[1]] = RunState(key=KEYS[1], state="running")
    assert summary(batch(), states, [row(0, outcome="timed_out")], (100_000, 20_000)) == (
        "1/4 ended (1 failed), 1 running, 2 queued",
        "0.0200 USD spent + 0.1000 USD reserved of 5 USD, about 3m left",
    )


def test_a_row_is_one_line() -> None:
    assert row_line(row(0)) == "fam/main/guess/1: scored 0.5 (1m30s, 0.0200 USD)"
    said = row_line(row(1, outcome="infrastructure_failed", score=None, attempts=3, message="No SSH."))
    assert said == "fam/main/guess/2: infrastructure failed (1m30s, 0.0200 USD, attempt 3): No SSH."


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
    lines = [line.partition("s ")[2] for line in text.getvalue().splitlines()]
    assert lines == [
        "fam/main/guess/1: Clearing away ",
        "fam/main/guess/1: begins",
        "fam/main/guess/1: begins again (attempt 2)",
        "[1/4] fam/main/guess/1: scored 0.5 (1m30s, 0.0200 USD)",
    ]


def test_on_a_terminal_it_is_a_live_picture() -> None:
    text = io.StringIO()
    view = BatchView(Console(file=text, force_terminal=True, width=120), batch())
    live_status = LiveStatus()
    with live_status.track(f"s-1/{KEYS[0]}") as running:
        running.phase = "boot"
        view.show(
            {KEYS[0]: RunState(key=KEYS[0], state="running")},
            [row(1, outcome="timed_out")],
            live_status.active_runs(),
            [],
            (0, 0),
        )
        view.stop()
    assert "boot" in text.getvalue()
    assert "1 the agent ran out of time" in text.getvalue()
