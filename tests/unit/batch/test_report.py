"""The report's text; tests with a browser look at the page."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from provisioner.batch.report import render
from provisioner.batch.results import Row
from provisioner.models import Phase

BEGIN = datetime(2026, 1, 2, 3, tzinfo=UTC)


def row(number: int, **changes: object) -> Row:
    values = {
        "key": f"guess/easy/solver/{number}", "family": "guess", "task": "easy", "agent": "solver",
        "repetition": number, "outcome": "scored", "score": 1.0, "environment": f"env-{number}",
        "cost_micro_usd": 12_500,
        "started_at": BEGIN, "ended_at": BEGIN + timedelta(seconds=90),
        "phases": (Phase(name="boot", seconds=30), Phase(name="agent", seconds=60)),
    }  # fmt: skip
    return Row.model_validate({**values, **changes})


def test_the_page_needs_nothing_else_and_shows_every_run() -> None:
    page = render("nightly", [row(1), row(2, score=0.0)], BEGIN, "../archive")
    assert not re.findall(r"(?:src|href)=\"(?:https?:)?//", page)
    assert "guess/easy/solver/2" in page
    assert "0.50 (0.09 to 0.91)" in page
    assert "0.0250 USD" in page
    assert 'href="../archive/env-1/logs"' in page


def test_what_agents_and_tasks_say_is_text() -> None:
    page = render("<b>", [row(1, outcome="task_failed", score=None, message="<script>x</script>", task="<i>")], BEGIN)
    assert "<script" not in page
    assert "<i>" not in page
    assert "&lt;script&gt;" in page
    assert "no score" in page


def test_a_run_that_was_tried_again_says_why() -> None:
    page = render("nightly", [row(1, attempts=2, retried=("The machine <gone>.",)), row(2)], BEGIN)
    assert "attempt 1: The machine &lt;gone&gt;." in page
    assert "needed more than one attempt" in page
    assert "needed more than one attempt" not in render("nightly", [row(2)], BEGIN)


def test_a_batch_of_nothing_is_a_page_too() -> None:
    assert "<h1>empty</h1>" in render("empty", [], BEGIN)
