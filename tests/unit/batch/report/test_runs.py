"""Each run with what was kept of it."""

from __future__ import annotations

import pytest

from provisioner.batch.report import runs
from provisioner.batch.report.evidence import Evidence
from provisioner.batch.report.runs import MAX_RUNS, MAX_SCORES, run_views
from tests.unit.batch.report.samples import logged, row

KEPT = Evidence(
    instructions="Guess.\n", submission="", agent_output="$ run\nhello", log_name="score.log", log="KeyError: 'x'",
    calls="T  agent@primary  exit 0 <now>",
)  # fmt: skip


def test_a_run_says_why_it_failed_before_anything_else() -> None:
    [view] = run_views([row(1, outcome="task_failed", message="Scoring raised <KeyError>")], {row(1).key: KEPT})
    assert view.label == "the task's own code failed"
    assert view.message == "Scoring raised &lt;KeyError&gt;"
    assert view.texts == (
        ("The end of score.log", "KeyError: &#39;x&#39;"), ("Instructions", "Guess."), ("Submission", "(empty)"),
        ("The agent's output", "$ run\nhello"), ("Recorded calls", "T  agent@primary  exit 0 &lt;now&gt;"),
    )  # fmt: skip
    assert (view.time, view.seconds) == ("1m30s", 90)


def test_a_run_of_which_nothing_was_kept_is_shown_too() -> None:
    [view] = run_views([row(1, started_at=None, score=None, outcome="cancelled")], {})
    assert (view.texts, view.time, view.seconds, view.score) == ((), "-", None, None)


def test_a_run_says_what_came_of_the_proof_of_its_isolation() -> None:
    [view] = run_views([row(1)], {row(1).key: Evidence(isolation_line="isolation proven: 24 probes, nothing reached")})
    assert view.isolation == "proven: 24 probes, nothing reached"


def test_the_score_log_shows_its_end() -> None:
    [view] = run_views([row(1, score_log=logged(None, *[0.5] * (MAX_SCORES + 3)))], {})
    assert (len(view.scores), view.more_scores) == (MAX_SCORES, 4)
    assert view.scores[-1] == ("24m", "0.5", "{&#34;n&#34;: 24}")
    [short] = run_views([row(1, score_log=logged(None))], {})
    assert short.scores == (("1m", "invalid", "{&#34;n&#34;: 1}"),)


@pytest.mark.parametrize("count", [1, 60, MAX_RUNS + 10])
def test_texts_are_bounded_for_any_number_of_runs(count: int) -> None:
    awful = '"' * 70_000
    evidence = Evidence(
        instructions=awful, submission=awful, agent_output=awful, log_name="score.log", log=awful, calls=awful,
    )  # fmt: skip
    rows = [row(number, message='"' * 16_000) for number in range(count)]
    views = run_views(rows, {each.key: evidence for each in rows})
    assert len(views) == min(count, MAX_RUNS)
    size = sum(len(text.encode()) for view in views for _, text in view.texts)
    assert size <= runs.EVIDENCE_BYTES
    assert min(len(text) for view in views for _, text in view.texts) > 400
    assert all(len(view.message) <= runs.MESSAGE_BYTES for view in views)
