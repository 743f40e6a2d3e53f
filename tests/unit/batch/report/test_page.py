"""The page as a whole: self-contained, readable without its script, and bounded."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest

from provisioner import package_data
from provisioner.batch.report.evidence import Evidence
from provisioner.batch.report.page import policy, render
from tests.unit.batch.report.samples import BEGIN, batch, logged, row


def test_the_page_names_nothing_outside_of_it() -> None:
    page = render(batch(row()), [row(1, score_log=logged(0.5))], BEGIN, {row().key: Evidence(agent_output="http://x")})
    assert set(re.findall(r'(?:src|href)="([^"]*)"', page)) <= {"data:,", *(f"#s-{name}" for name in ("scored",))}
    assert not re.search(r"@import|url\(|<iframe|<object|<a ", page)
    assert "http://x</pre>" in page


def test_every_run_is_in_the_page_before_any_script_runs() -> None:
    rows = [row(number, score=number / 4) for number in range(4)]
    page = render(batch(*rows), rows, BEGIN, {})
    assert page.count('<li class="run"') == 4
    assert '<form id="controls" hidden>' in page
    assert "<b>0.38</b>" in page
    assert "<title>nightly: results</title>" in page


def test_empty_sections_are_left_out() -> None:
    page = render(batch(row()), [row()], BEGIN, {})
    for absent in ("Cost by task", "USD", "Scores over time"):
        assert absent not in page
    dear = render(batch(row()), [row(1, cost_micro_usd=12_500), row(2, agent="b")], BEGIN, {})
    for present in ("Cost by task", "0.0125 USD"):
        assert present in dear


def test_a_run_that_was_tried_again_says_why() -> None:
    page = render(batch(row()), [row(1, attempts=2, retried=("The machine <gone>.",))], BEGIN, {})
    assert "Attempt 1: The machine &lt;gone&gt;." in page
    assert "needed more than one attempt: 1" in page


def test_a_run_shows_what_may_have_spoilt_it() -> None:
    page = render(batch(row()), [row(1, warnings=("The task <a> was read twice.",))], BEGIN, {})
    assert "Warning: The task &lt;a&gt; was read twice." in page


@pytest.mark.parametrize(
    "rows", [[], [row(1, score=1e308), row(2, score=-1e308, started_at=None)]], ids=["none", "odd"]
)
def test_any_batch_is_a_page(rows: list[object]) -> None:
    assert "<h1>nightly</h1>" in render(batch(), rows, BEGIN, {})  # type: ignore[arg-type]


def test_the_page_is_bounded_however_hostile_its_texts_are() -> None:
    awful, name = '"' * 70_000, "<&" * 600
    evidence = Evidence(instructions=awful, submission=awful, agent_output=awful, log_name="score.log", log=awful)
    rows = [
        row(
            number, task=name, agent=name, message=awful[:16_000], retried=[awful[:16_000]] * 50,
            warnings=[awful[:16_000]] * 50,
            phases=[{"name": '"' * 200, "seconds": 1}] * 1000, score_log=logged(*[0.5] * 300),
            machine_types={"primary": awful[:16_000]}, ended_at=BEGIN + timedelta(days=300),
        )
        for number in range(60)
    ]  # fmt: skip
    page = render(batch(*rows), rows, BEGIN, {each.key: evidence for each in rows})
    assert len(page.encode()) < 16 << 20


def test_the_policy_changes_with_the_script() -> None:
    assert policy("a", "b") != policy("a", "c")
    assert "script-src 'sha256-PiPoFgA5WUoziU9lZOGxNIu9egCI1CxKy3PurtWcAJ0='" in policy("a", "b")


def test_templates_trust_no_text() -> None:
    directory = package_data.directory("templates") / "report"
    for path in directory.glob("*.j2"):
        assert not re.search(r"\|\s*safe|autoescape|<script(?!>)|\son\w+=|\sstyle=", path.read_text()), path
    script = (directory / "script.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function|</|fetch|import", script)
    assert "</" not in (directory / "style.css").read_text()
