"""A user who can write to the queue's database forges rows of results: times without a zone, costs of 400 digits.

Whatever a row says, it is a row that every view can show, or one failed run. No view ends the batch's controller.
"""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from rich.console import Console

from provisioner.batch.queue import RunState, serializer
from provisioner.batch.records import Batch, Batches
from provisioner.batch.results import OUTCOMES, Row
from provisioner.batch.rows import collect_rows
from provisioner.batch.suite import Run, Suite
from provisioner.cli.commands.batch.results import final_result
from provisioner.cli.commands.batch.view import BatchView
from provisioner.costs.ledger import Ledger
from provisioner.store.home import Home
from tests.attacks.fuzzing import changed, fuzz

AT = datetime(2026, 1, 2, tzinfo=UTC)
SUITE = {"name": "s", "families": [{"path": "fam"}], "submissions": [{"name": "a", "text": ""}], "concurrency": 1}
RUNS = tuple(Run(key=f"fam/t/a/{n}", family="/fam", task="t", agent="a", repetition=n) for n in range(1, 20))
BATCH = Batch(
    id="b", suite=Suite.model_validate(SUITE), suite_file="/s.yaml", shared=True, created_at=AT, version="1", runs=RUNS
)
FORGED, HONEST = (run.key for run in RUNS[:2])
STATES = {run.key: RunState(key=run.key, state="queued") for run in RUNS} | {
    key: RunState(key=key, state="done") for key in (FORGED, HONEST)
}
ROW: dict[str, Any] = {
    "key": FORGED, "family": "fam", "task": "t", "agent": "a", "repetition": 1, "outcome": "scored", "score": 1.0,
    "message": "m", "agent_exit_code": 0, "attempts": 2, "retried": ["spot"], "environment": "fam-t-1",
    "cloud": "aws", "region": "r", "machine_types": {"primary": "m"}, "images": {"primary": "i"}, "cost_micro_usd": 5,
    "started_at": "2026-01-02T00:00:00Z", "ended_at": "2026-01-02T00:00:10Z",
    "phases": [{"name": "boot", "seconds": 2.5}], "version": "1",
}  # fmt: skip
ENTRY: dict[str, Any] = {
    "score": 0.5, "elapsed_seconds": 5, "scored_at": "2026-01-02T00:00:05Z", "message": {"a": [1, None]}, "details": {},
}  # fmt: skip
ROW["score_log"] = [ENTRY, ENTRY | {"score": None}]
OTHER = ROW | {"key": HONEST, "repetition": 2}

FORGERIES: dict[str, dict[str, Any]] = {
    "cost": {"cost_micro_usd": 10**400},
    "negative_cost": {"cost_micro_usd": -1},
    "naive_begin": {"started_at": "2026-01-02T00:00:00"},
    "naive": {"started_at": "2026-01-02T00:00:00", "ended_at": "2026-01-02T00:00:05"},
    "seconds": {"phases": [{"name": "boot", "seconds": 1e308}] * 2},
    "phases": {"phases": [{"name": "boot", "seconds": 1}] * 5000},
    "exit_code": {"agent_exit_code": 10**400},
    "attempts": {"attempts": 10**400},
    "message": {"message": "x" * 1_000_000},
    "retried": {"retried": ["x"] * 50_000},
    "warnings": {"warnings": ["x"] * 50_000},
    "long_warning": {"warnings": ["x" * 1_000_000]},
    "long_score_log": {"score_log": [ENTRY] * 501},
    "large_score_log": {"score_log": [ENTRY | {"details": {"x": "y" * 70_000}}]},
    "late_score": {"score_log": [ENTRY | {"elapsed_seconds": 1e300}]},
    "naive_score": {"score_log": [ENTRY | {"scored_at": "2026-01-02T00:00:05"}]},
    "roles": {"images": {str(number): "" for number in range(1000)}},
}
# Strange, but true of something: views show them.
ODD: dict[str, dict[str, Any]] = {
    "millennia": {"started_at": "0001-01-01T00:00:00Z", "ended_at": "9999-12-31T23:59:59Z"},
    "edges": {"started_at": "0001-01-01T00:00:00+14:00", "ended_at": "9999-12-31T23:59:59-12:00"},
    "backwards": {"started_at": "2026-01-02T00:00:10Z", "ended_at": "2026-01-02T00:00:00Z"},
    "score": {"score": -1e308},
    "early_score": {"score_log": [ENTRY | {"elapsed_seconds": -1e10, "score": 1e308}]},
}


class Views:
    """Reads rows as a batch's controller does, and shows them everywhere."""

    def __init__(self, directory: Path) -> None:
        self.home = Home(directory)
        self.home.make()
        self.ledger = Ledger(directory / "ledger.sqlite")
        self.batches = Batches(self.home)
        self.batches.directory(BATCH.id).mkdir(parents=True)

    def show(self, value: object) -> Row:
        """Shows what the queue says of one run beside an honest one, and returns the row that it became."""
        outputs = {FORGED: serializer().deserialize(json.dumps(value)), HONEST: OTHER}
        rows = collect_rows(BATCH, STATES, {}, lambda _: outputs, self.ledger)
        assert [row.key for row in rows] == [FORGED, HONEST]
        assert rows[1].outcome == "scored"
        self.batches.write_results(BATCH, rows)
        assert self.batches.results(BATCH) == rows
        json.dumps(final_result(self.home, BATCH, rows, (0, 0)).data)
        shown = io.StringIO()
        view = BatchView(Console(file=shown, force_terminal=True, width=120), BATCH)
        view.show(STATES, rows, [], [], (0, 0))
        view.stop()
        return rows[0]


@pytest.fixture
def views(tmp_path: Path) -> Views:
    return Views(tmp_path)


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_row_is_one_failed_run(views: Views, forgery: dict[str, object]) -> None:
    row = views.show(ROW | forgery)
    assert row.outcome == "infrastructure_failed"
    assert "another user of the database changed it" in row.message


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_an_odd_row_is_shown(views: Views, odd: dict[str, object]) -> None:
    assert views.show(ROW | odd).outcome == "scored"


@pytest.mark.campaign
def test_random_rows_are_shown_or_one_failed_run(views: Views) -> None:
    times = st.datetimes().map(lambda time: {"started_at": time.isoformat(), "ended_at": f"{time.isoformat()}Z"})
    forged = st.one_of(times, st.sampled_from([*FORGERIES.values(), *ODD.values()])).map(lambda change: ROW | change)

    def check(value: object) -> None:
        assert views.show(value).outcome in OUTCOMES

    fuzz(changed(ROW).filter(_is_json) | forged, check)


def _is_json(value: object) -> bool:
    try:
        serializer().deserialize(json.dumps(value))
    except ValueError:
        return False
    return True
