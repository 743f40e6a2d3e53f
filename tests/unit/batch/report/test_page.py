"""The page as a whole: self-contained, readable without its script, bounded; and what it says about the batch."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest

from provisioner.base.config import data_directory
from provisioner.batch.report.evidence import Evidence
from provisioner.batch.report.page import agents, how_it_ran, policy, render, totals
from tests.unit.batch.report.samples import BEGIN, batch, logged, row
from tests.unit.recording.proofs import proof


def test_the_page_names_nothing_outside_of_it() -> None:
    page = render(batch(row()), [row(1, score_log=logged(0.5))], {row().key: Evidence(agent_output="http://x")})
    assert set(re.findall(r'(?:src|href)="([^"]*)"', page)) <= {"data:,", *(f"#s-{name}" for name in ("scored",))}
    assert not re.search(r"@import|url\(|<iframe|<object|<a ", page)
    assert "http://x</pre>" in page


def test_every_run_is_in_the_page_before_any_script_runs() -> None:
    rows = [row(number, score=number / 4) for number in range(4)]
    page = render(batch(*rows), rows, {})
    assert page.count('<li class="run"') == 4
    assert '<form id="controls" hidden>' in page
    assert "<b>0.38</b>" in page
    assert "<title>nightly: results</title>" in page


def test_empty_sections_are_left_out() -> None:
    page = render(batch(row()), [row()], {})
    for absent in ("Cost by task", "USD"):
        assert absent not in page
    dear = render(batch(row()), [row(1, cost_micro_usd=12_500), row(2, agent="b")], {})
    for present in ("Cost by task", "0.0125 USD"):
        assert present in dear


def test_a_run_that_was_tried_again_says_why() -> None:
    page = render(batch(row()), [row(1, attempts=2, retried=("The machine <gone>.",))], {})
    assert "Attempt 1: The machine &lt;gone&gt;." in page
    assert "needed more than one attempt: 1" in page


def test_a_failed_run_says_why_and_how_many_scores_are_left_out() -> None:
    failed = row(1, outcome="task_failed", message="Scoring raised <KeyError>", score_log=logged(*[0.5] * 24))
    page = render(batch(row()), [failed], {})
    assert "the task&#39;s own code failed" in page
    assert '<p class="why">Scoring raised &lt;KeyError&gt;</p>' in page
    assert "4 earlier ones are in results.jsonl." in page
    long = render(batch(row()), [row(1, message='"' * 16_000)], {})
    assert len(max(long.splitlines(), key=len)) < 3100


def test_a_run_shows_what_may_have_spoilt_it() -> None:
    page = render(batch(row()), [row(1, warnings=("The task <a> was read twice.",))], {})
    assert "Warning: The task &lt;a&gt; was read twice." in page


@pytest.mark.parametrize(
    "rows", [[], [row(1, score=1e308), row(2, score=-1e308, started_at=None)]], ids=["none", "odd"]
)
def test_any_batch_is_a_page(rows: list[object]) -> None:
    assert "<h1>nightly</h1>" in render(batch(), rows, {})  # type: ignore[arg-type]


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
    page = render(batch(*rows), rows, {each.key: evidence for each in rows})
    assert len(page.encode()) < 16 << 20


def test_the_policy_changes_with_the_script() -> None:
    assert policy("a", "b") != policy("a", "c")
    assert "script-src 'sha256-PiPoFgA5WUoziU9lZOGxNIu9egCI1CxKy3PurtWcAJ0='" in policy("a", "b")


def test_templates_trust_no_text() -> None:
    directory = data_directory("templates") / "report"
    for path in directory.glob("*.j2"):
        assert not re.search(r"\|\s*safe|autoescape|<script(?!>)|\son\w+=|\sstyle=", path.read_text()), path
    script = (directory / "script.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function|</|fetch|import", script)
    assert "</" not in (directory / "style.css").read_text()


def test_the_figures_tell_timeouts_from_failures() -> None:
    rows = [row(1), row(2, outcome="timed_out"), row(3, outcome="agent_failed"), row(4, outcome="over_budget")]
    assert totals(rows, 6) == {
        "runs": "4 of 6", "tasks": "1", "agents": "1", "scored": "1", "timed out": "1", "failed": "1", "not run": "1",
        "time": "1m30s",
    }  # fmt: skip
    assert totals([row(1, cost_micro_usd=1_250_000)], 1)["cost"] == "1.25 USD"
    assert totals([], 0)["time"] == "-"


def test_a_reader_learns_what_it_takes_to_run_it_again() -> None:
    rows = [row(1, region="eu-central-1", cloud="aws", machine_types={"primary": "m7i.large"}, version="1.5")]
    versions = {"accelerator": "KVM", "QEMU": "7.2.22"}
    known = {rows[0].key: Evidence(machines={"primary": "2 CPUs, 4 GiB"}, versions=versions, internet=False)}
    record = batch(*rows, cloud="aws", spot=True, budget=5, allow=["example.org:443"])
    facts = how_it_ran(record, rows, known)
    assert facts["time limits"] == "agent 30m, environment 2h"
    assert facts["cloud"] == "aws, spot instances first"
    assert facts["regions"] == "eu-central-1"
    assert facts["machine types"] == "primary: m7i.large"
    assert facts["machines"] == "primary: 2 CPUs, 4 GiB"
    assert facts["versions"] == "accelerator KVM, QEMU 7.2.22"
    assert facts["internet"] == "none but example.org:443"
    assert facts["budget"] == "5 USD"
    page = render(record, rows, known)
    assert "agents limited to 30m" in page
    assert "provisioner 1.4, 1.5" in page


def test_a_local_batch_has_no_budget_and_no_machine_types() -> None:
    facts = how_it_ran(batch(row(), budget=5), [row()], {})
    assert not {"budget", "machine types", "regions", "machines", "internet"} & facts.keys()


def test_agents_are_there_with_their_commands() -> None:
    command, submission = "python3 solve.py --steps 200", ("fixed", "submission", "42")
    rows = [row(agent="solver", agent_files=files) for files in ("a" * 64, "b" * 64, "a" * 64)]
    both = f"{'a' * 64}, {'b' * 64}"
    assert agents(batch(row()).suite, rows) == [("solver", f"command; files {both}", command), submission]
    assert agents(batch(row()).suite, []) == [("solver", "command; files not known", command), submission]


def test_the_header_says_how_many_runs_are_isolated() -> None:
    known = {
        "a": Evidence(isolation=proof().compact()),
        "b": Evidence(isolation=proof(proven=False, problem="It leaks.").compact()),
        "c": Evidence(),
    }
    assert how_it_ran(batch(), [], known)["isolation"] == "proven in 1 of 2 runs, by 1 probes"
    assert "isolation" not in how_it_ran(batch(), [], {"c": Evidence()})


def test_some_runs_with_internet_are_told_from_those_without() -> None:
    known = {"a": Evidence(internet=True), "b": Evidence(internet=False)}
    assert how_it_ran(batch(), [], known)["internet"] == "1 runs all of it, 1 none"
    assert how_it_ran(batch(), [], {"a": Evidence(internet=True)})["internet"] == "all of it"
