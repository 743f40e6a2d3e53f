"""The records of batches: how they are found, and how cancelled runs are noted."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.errors import InfrastructureError, UsageError
from provisioner.batch.records import LOCK, Batches, jobs_of, suite_for
from provisioner.batch.rows import failed_row
from provisioner.recording.manifest import load, problems, seal
from provisioner.store.files import is_locked
from provisioner.store.home import Home
from tests.unit.batch.samples import AT, batch, run, suite

RUN = run()


@pytest.fixture
def batches(tmp_path: Path) -> Batches:
    home = Home(tmp_path / "home")
    home.make()
    return Batches(home)


def test_a_batch_is_found_by_an_unambiguous_end_of_its_id(batches: Batches) -> None:
    for name in ("nightly-abc", "nightly-abcd", "weekly-xyz"):
        batches.save(batch(id=name))
    assert batches.find("nightly-abc").id == "nightly-abc"
    assert batches.find("week").id == "weekly-xyz"
    assert batches.find("bcd").id == "nightly-abcd"
    with pytest.raises(UsageError, match="could mean any of: nightly-abc, nightly-abcd"):
        batches.find("nightly")
    for name in ("", "x"):
        with pytest.raises(UsageError, match="There is no batch"):
            batches.find(name)


def test_a_damaged_record_is_an_error_and_does_not_hide_others(batches: Batches) -> None:
    batches.save(batch(id="new"))
    batches.save(batch(id="old", created_at=AT - timedelta(hours=1)))
    batches.directory("broken").mkdir()
    (batches.directory("broken") / "batch.json").write_text("{")
    assert [known.id for known in batches.all()] == ["old", "new"]
    with pytest.raises(InfrastructureError, match="cannot be read"):
        batches.find("broken")


def test_results_are_read_back_as_they_were_written(batches: Batches) -> None:
    known = batch()
    batches.save(known)
    assert batches.results(known) == []
    rows = [failed_row(RUN, "it broke")]
    batches.write_results(known, rows)
    assert batches.results(known) == rows
    directory = batches.directory(known.id)
    assert problems(directory, load(directory)) == []
    assert [entry.name for entry in load(directory).entries] == ["results.csv", "results.jsonl"]


def test_a_report_replaces_no_results_by_fewer(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    known = batch()
    batches.save(known)
    rows = [failed_row(RUN, "it broke"), failed_row(RUN, "it broke again")]
    batches.write_results(known, rows)
    batches.write_results(known, rows[:1], if_none_is_lost=True)
    assert batches.results(known) == rows
    seen = []

    def sealing(directory: Path, *arguments: Any) -> str:
        seen.append(is_locked(directory / LOCK))
        return seal(directory, *arguments)

    monkeypatch.setattr("provisioner.batch.records.seal", sealing)
    batches.write_results(known, rows[:1])
    assert (seen, batches.results(known)) == ([True], rows[:1])


def test_damaged_results_are_an_error(batches: Batches) -> None:
    known = batch()
    batches.save(known)
    (batches.directory("b-1") / "results.jsonl").write_text('{"key": "x", "of": "a later version"}\n')
    with pytest.raises(InfrastructureError, match=r"The results .*results\.jsonl cannot be read: ValidationError"):
        batches.results(known)
    batches.write_results(known, [], if_none_is_lost=True)  # as where the queue is gone: they are the only copy
    assert "a later version" in (batches.directory("b-1") / "results.jsonl").read_text()
    rows = [failed_row(RUN, "it broke")]
    batches.write_results(known, rows, if_none_is_lost=True)
    assert batches.results(known) == rows


def test_results_on_a_bad_disk_are_an_error_with_the_reason(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    known = batch()
    batches.save(known)
    rows = [failed_row(RUN, "it broke")]
    batches.write_results(known, rows)

    def failing(_: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", failing)
        with pytest.raises(InfrastructureError, match=r"results\.jsonl cannot be read: Input/output error\."):
            batches.write_results(known, rows, if_none_is_lost=True)
    assert batches.results(known) == rows


def test_cancelled_runs_add_up_until_the_batch_is_resumed(batches: Batches) -> None:
    shared = batch(shared=True)
    batches.save(shared)
    assert batches.cancelled(shared) == frozenset()
    batches.note_cancelled(shared, ["a"])
    batches.note_cancelled(shared, ["b"])
    assert batches.cancelled(shared) == frozenset({"a", "b"})
    batches.forget_cancelled(shared)
    assert batches.cancelled(shared) == frozenset()


def test_cancellations_at_once_wait_for_each_other(batches: Batches) -> None:
    known = batch()
    batches.save(known)

    def keys() -> Iterator[str]:
        yield "a"
        assert is_locked(batches.directory(known.id) / LOCK)  # what was noted before has been read, and not written yet

    batches.note_cancelled(known, keys())
    assert batches.noted_cancelled(known) == {"a"}


def test_the_queue_alone_says_which_runs_are_cancelled(batches: Batches) -> None:
    alone = batch()
    batches.save(alone)
    batches.note_cancelled(alone, ["a"])
    batches.note_cancelled(alone, ["b"])
    assert batches.cancelled(alone) is None
    assert batches.noted_cancelled(alone) == {"a", "b"}
    (batches.directory(alone.id) / "cancelled.json").write_text("[")
    with pytest.raises(InfrastructureError, match="The note of what was cancelled"):
        batches.noted_cancelled(alone)


def test_a_job_has_only_the_part_of_the_suite_that_its_run_needs() -> None:
    agents = [{"name": name, "directory": ".", "command": "true"} for name in ("one", "two")]
    families = [{"path": "a"}, {"path": "b"}]
    whole = suite(families=families, agents=agents, submissions=[{"name": "three", "text": "x" * 1000}])
    assert [agent.name for agent in suite_for(whole, run("two")).agents] == ["two"]
    assert suite_for(whole, run("two")).submissions == ()
    assert [submission.name for submission in suite_for(whole, run("three")).submissions] == ["three"]
    assert suite_for(whole, run("one")).limits == whole.limits


def test_a_batch_has_a_job_for_each_run() -> None:
    jobs = jobs_of(batch())
    assert list(jobs) == [RUN.key]
    assert jobs[RUN.key].directory == "/"
    assert jobs[RUN.key].run == RUN
