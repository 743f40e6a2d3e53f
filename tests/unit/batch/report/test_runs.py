"""Each run with what was kept of it: escaped, printable, and never more bytes of HTML than were allowed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.batch.report import runs
from provisioner.batch.report.evidence import Evidence
from provisioner.batch.report.runs import LEAST_BYTES, MAX_RUNS, MAX_SCORES, first_part, last_part, run_views
from tests.unit.batch.report.samples import logged, row

LIMIT = 1000
KEPT = Evidence(
    instructions="Guess.\n", submission="", agent_output="$ run\nhello", log_name="score.log", log="KeyError: 'x'",
    calls="T  agent@primary  exit 0 <now>",
)  # fmt: skip


def test_a_run_says_why_it_failed_before_anything_else() -> None:
    [view] = run_views([row(1, outcome="task_failed")], {row(1).key: KEPT})
    assert view.texts == (
        ("The end of score.log", "KeyError: &#39;x&#39;"), ("Instructions", "Guess."), ("Submission", "(empty)"),
        ("The agent's output", "$ run\nhello"), ("Recorded calls", "T  agent@primary  exit 0 &lt;now&gt;"),
    )  # fmt: skip
    assert (view.time, view.seconds) == ("1m30s", 90)


def test_a_run_of_which_nothing_was_kept_is_shown_too() -> None:
    [view] = run_views([row(1, started_at=None, score=None, outcome="cancelled")], {})
    assert (view.texts, view.time, view.seconds) == ((), "-", None)


def test_a_run_says_what_came_of_the_proof_of_its_isolation() -> None:
    [view] = run_views([row(1)], {row(1).key: Evidence(isolation_line="isolation proven: 24 probes, nothing reached")})
    assert view.isolation == "proven: 24 probes, nothing reached"


def test_the_score_log_shows_its_end() -> None:
    [view] = run_views([row(1, score_log=logged(None, *[0.5] * (MAX_SCORES + 3)))], {})
    assert len(view.scores) == MAX_SCORES
    assert view.scores[-1] == ("24m", "0.5", "{&#34;n&#34;: 24}")
    [short] = run_views([row(1, score_log=logged(None))], {})
    assert short.scores == (("1m", "invalid", "{&#34;n&#34;: 1}"),)


@pytest.mark.parametrize("count", [1, 60, MAX_RUNS + 10])
def test_texts_are_bounded_for_any_number_of_runs(count: int) -> None:
    awful = '"' * 70_000
    evidence = Evidence(
        instructions=awful, submission=awful, agent_output=awful, log_name="score.log", log=awful, calls=awful,
    )  # fmt: skip
    rows = [row(number) for number in range(count)]
    views = run_views(rows, {each.key: evidence for each in rows})
    assert len(views) == min(count, MAX_RUNS)
    size = sum(len(text.encode()) for view in views for _, text in view.texts)
    assert size <= runs.EVIDENCE_BYTES
    assert min(len(text) for view in views for _, text in view.texts) > 400


def test_text_that_fits_is_shown_whole() -> None:
    assert first_part("one <b>\ntwo & 'three'", LIMIT) == "one &lt;b&gt;\ntwo &amp; &#39;three&#39;"
    assert last_part("\x1b[31mred\x1b[0m\u202e\n", LIMIT) == "red\ufffd"


def test_text_that_does_not_fit_is_cut_with_a_mark() -> None:
    text = "\n".join(f"line {number}" for number in range(1000))
    first, last = first_part(text, LIMIT), last_part(text, LIMIT)
    assert first.startswith("line 0\nline 1\n")
    assert first.endswith("[...]")
    assert last.startswith("[...]\nline ")
    assert last.endswith("line 999")
    assert 900 < len(first.encode()) <= LIMIT
    assert 900 < len(last.encode()) <= LIMIT


@pytest.mark.parametrize("character", ['"', "&", "\U0001f600", "\u202e", "\x00", "x", " ", "\n", "\ufdfa"])
@pytest.mark.parametrize("limit", [0, LEAST_BYTES, LIMIT, 5000])
def test_what_is_long_as_html_is_bounded_too(character: str, limit: int) -> None:
    for part in (first_part(character * 20_000, limit), last_part(character * 20_000, limit)):
        assert len(part.encode()) <= max(limit, LEAST_BYTES)


@given(st.text(st.sampled_from("a\"'<&\n\u202e\U0001f600 "), max_size=3000), st.integers(0, 3000))
def test_any_text_is_bounded(text: str, limit: int) -> None:
    for part in (first_part(text, limit), last_part(text, limit)):
        assert len(part.encode()) <= max(limit, LEAST_BYTES)
        assert "<" not in part
