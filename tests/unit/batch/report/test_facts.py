"""What the page says about how the batch was run."""

from __future__ import annotations

from provisioner.batch.report.evidence import Evidence
from provisioner.batch.report.facts import agents, how_it_ran, line, totals
from tests.unit.batch.report.samples import BEGIN, batch, row
from tests.unit.recording.proofs import proof


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
    known = {rows[0].key: Evidence(machines={"primary": "2 CPUs, 4 GiB"}, internet=False)}
    record = batch(*rows, cloud="aws", spot=True, budget=5, allow=["example.org:443"])
    facts = how_it_ran(record, rows, known, BEGIN)
    assert facts["suite"] == "nightly"
    assert facts["time limits"] == "agent 30m, environment 2h"
    assert facts["cloud"] == "aws, spot instances first"
    assert facts["regions"] == "aws eu-central-1"
    assert facts["machine types"] == "primary: m7i.large"
    assert facts["machines"] == "primary: 2 CPUs, 4 GiB"
    assert facts["internet"] == "none but example.org:443"
    assert facts["provisioner"] == "1.4, 1.5"
    assert facts["budget"] == "5 USD"
    assert "agents limited to 30m" in line(record, rows)


def test_a_local_batch_has_no_budget_and_no_machine_types() -> None:
    facts = how_it_ran(batch(row(), budget=5), [row()], {}, BEGIN)
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
    assert how_it_ran(batch(), [], known, BEGIN)["isolation"] == "proven in 1 of 2 runs, by 1 probes"
    assert "isolation" not in how_it_ran(batch(), [], {"c": Evidence()}, BEGIN)


def test_some_runs_with_internet_are_told_from_those_without() -> None:
    known = {"a": Evidence(internet=True), "b": Evidence(internet=False)}
    assert how_it_ran(batch(), [], known, BEGIN)["internet"] == "1 runs all of it, 1 none"
    assert how_it_ran(batch(), [], {"a": Evidence(internet=True)}, BEGIN)["internet"] == "all of it"
