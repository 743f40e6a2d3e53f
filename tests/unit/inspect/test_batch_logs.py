"""A batch's results as logs of Inspect, read back by Inspect itself."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import ChatMessageAssistant

from provisioner.batch.report.evidence import Evidence
from provisioner.inspect.batch_logs import write_logs
from tests.batch import report_sample
from tests.unit.batch.report.samples import BEGIN, batch, logged, row
from tests.unit.recording.proofs import proof


def read(directory: Path, *rows: object, **evidence: Evidence) -> list[EvalLog]:
    paths = write_logs(batch(), list(rows), evidence, directory)  # type: ignore[arg-type]
    return [read_eval_log(str(path)) for path in paths]


def test_each_family_and_agent_has_a_log_with_its_runs(tmp_path: Path) -> None:
    logs = read(tmp_path, row(1), row(2, score=0.0), row(1, task="hard"), row(1, agent="other"), row(1, family="maze"))
    assert [(log.eval.task, log.eval.model, log.status) for log in logs] == [
        ("guess", "provisioner/solver", "success"),
        ("guess", "provisioner/other", "success"),
        ("maze", "provisioner/solver", "success"),
    ]
    first = logs[0]
    assert first.samples is not None
    assert {(sample.id, sample.epoch) for sample in first.samples} == {("easy", 1), ("easy", 2), ("hard", 1)}
    assert first.eval.dataset.sample_ids == ["easy", "hard"]
    assert first.eval.metadata is not None
    assert first.eval.metadata["command"] == "python3 solve.py --steps 200"
    assert first.eval.config.time_limit == 1800
    assert first.results is not None
    assert first.results.scores[0].metrics["mean"].value == pytest.approx(2 / 3)
    assert first.stats.started_at == BEGIN.isoformat(timespec="seconds")


def test_a_sample_has_all_that_was_kept_of_its_run(tmp_path: Path) -> None:
    run = row(1, score=0.5, score_log=logged(0.25, None), agent_exit_code=0, cost_micro_usd=20_000, recording="0" * 64)
    kept = Evidence(
        instructions="Guess.", submission="42", agent_output="\x1b[31mhello\x1b[0m\u202e",
        calls="root@primary  ls\x1b[2J", isolation=proof().compact(), isolation_line=proof().line(),
    )  # fmt: skip
    [log] = read(tmp_path, run, **{run.key: kept})
    assert log.samples is not None
    [sample] = log.samples
    assert sample.input == "Guess."
    assert isinstance(sample.messages[-1], ChatMessageAssistant)
    assert sample.output.completion == "42"
    assert sample.scores is not None
    assert (sample.scores["provisioner"].value, sample.scores["provisioner"].answer) == (0.5, "42")
    assert [event.score.value for event in sample.events if event.event == "score"] == [0.25, "invalid"]
    assert {event.source: event.data for event in sample.events if event.event == "info"} == {
        "isolation": proof().compact(), "the agent's output": "hello\ufffd",
        "recorded calls": "root@primary  ls",
    }  # fmt: skip
    assert (sample.metadata["recording"], sample.metadata["isolation"]) == ("0" * 64, proof().line())
    assert (sample.metadata["cost_usd"], sample.metadata["seconds"]) == (0.02, {"boot": 30, "agent": 60})
    assert sample.total_time == 90


def test_a_run_that_ends_before_it_begins_took_no_time(tmp_path: Path) -> None:
    [log] = read(tmp_path, row(1, ended_at=BEGIN - timedelta(hours=3)))
    assert log.samples is not None
    assert log.samples[0].total_time == 0


@pytest.mark.parametrize(
    ("outcome", "is_error", "limit"),
    [
        ("scored", False, None),
        ("agent_failed", False, None),
        ("timed_out", False, "time"),
        ("task_failed", True, None),
        ("infrastructure_failed", True, None),
        ("over_budget", True, None),
        ("cancelled", True, None),
    ],
)
def test_what_is_not_the_agents_doing_is_an_error(
    tmp_path: Path, outcome: str, is_error: bool, limit: str | None
) -> None:
    run = row(1, outcome=outcome, score=None, message="It broke.", started_at=None)
    [log] = read(tmp_path, run, **{run.key: Evidence(log="KeyError: 'x'")})
    assert log.samples is not None
    [sample] = log.samples
    assert (sample.error.message if sample.error else None) == ("It broke." if is_error else None)
    assert (sample.error.traceback if sample.error else "KeyError: 'x'") == "KeyError: 'x'"
    assert (sample.limit.type if sample.limit else None) == limit
    assert sample.scores == {}
    assert log.status == ("cancelled" if outcome == "cancelled" else "success")
    assert log.results is not None
    assert log.results.completed_samples == (not is_error)


def test_a_whole_batch_is_read_back(tmp_path: Path) -> None:
    rows = report_sample.rows()
    paths = write_logs(report_sample.batch(), rows, report_sample.evidence(), tmp_path)
    assert len(paths) == len({path.name for path in paths}) == 9
    found = {
        (log.eval.task, sample.id, log.eval.solver, sample.epoch): sample.scores["provisioner"].value
        for log in (read_eval_log(str(path)) for path in paths)
        for sample in log.samples or []
        if sample.scores
    }
    assert found == {
        (row.family, row.task, row.agent, row.repetition): row.score for row in rows if row.score is not None
    }


@pytest.mark.parametrize("name", ["../../x", "a/b", "", "\u202e\x00", "x" * 5000], ids=str.isascii)
def test_no_name_leaves_the_directory(tmp_path: Path, name: str) -> None:
    [path] = write_logs(batch(), [row(1, family=name, agent=name)], {}, tmp_path)
    assert path.resolve().parent == tmp_path
    assert read_eval_log(str(path)).samples


def test_a_later_export_replaces_the_logs_of_an_earlier_one(tmp_path: Path) -> None:
    rows = report_sample.rows()
    early = write_logs(report_sample.batch(), rows[-1:], report_sample.evidence(), tmp_path)
    assert set(early) < set(write_logs(report_sample.batch(), rows, report_sample.evidence(), tmp_path))
