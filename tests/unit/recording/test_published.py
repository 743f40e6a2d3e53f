"""Tests how results are compared with the sealed logs of their environments, and with their own seal."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from provisioner.batch.results import Row, as_jsonl
from provisioner.recording.manifest import seal
from provisioner.recording.published import Checked, check_results
from provisioner.store.files import write_atomically

FACTS: dict[str, Any] = {
    "environment": "env-1",
    "family": "fam",
    "family_version": "1",
    "task": "main",
    "images": {"primary": "base"},
    "agent_files": "a" * 64,
    "agent_exit_code": 0,
    "score": 1.0,
}


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A batch's results, as published: with their seal, and the logs of their one environment."""
    logs = tmp_path / "env-1"
    logs.mkdir()
    (logs / "agent.log").write_text("solved\n")
    head = seal(logs, FACTS, write_atomically)
    row = Row(
        key="fam/main/a/1", family="fam", task="main", agent="a", repetition=1, outcome="scored", score=1.0,
        environment="env-1", images={"primary": "base"}, recording=head,
        agent_files="a" * 64, agent_exit_code=0, family_version="1",
    )  # fmt: skip
    no_machine: dict[str, Any] = {"score": None, "recording": "", "environment": "env-2", "repetition": 2}
    unsuited = row.model_copy(update={"outcome": "over_budget", **no_machine})
    (tmp_path / "results.jsonl").write_text(as_jsonl([row, unsuited]))
    seal(tmp_path, {"batch": "b"}, write_atomically, ("results.jsonl",))
    return tmp_path / "results.jsonl"


def check(path: Path) -> list[Checked]:
    return check_results(path, lambda name: [path.parent / name])


def said(path: Path) -> list[tuple[str, str, str]]:
    return [(each.name, problem.file, problem.message) for each in check(path) for problem in each.problems]


def with_row(path: Path, **changes: Any) -> Path:
    """Results with another first row, and nothing else."""
    row = json.loads(path.read_text().splitlines()[0])
    path.write_text(json.dumps(row | changes) + "\n")
    (path.parent / "manifest.json").unlink()
    return path


def test_results_as_they_were_published_have_no_problems(published: Path) -> None:
    checked = check(published)
    assert [(each.name, each.files, each.problems) for each in checked] == [
        ("results.jsonl", 1, ()),
        ("env-1", 1, ()),
    ]
    assert all(len(each.head) == 64 for each in checked)


def test_every_altered_byte_of_the_results_is_noticed(published: Path) -> None:
    before = published.read_bytes()
    for at in range(len(before)):
        changed = bytearray(before)
        changed[at] ^= 1
        published.write_bytes(changed)
        try:
            assert ("results.jsonl", "results.jsonl", "its contents have changed") in said(published), at
        except ValueError:  # it holds no results any more
            continue


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"score": 0.5}, ("env-1", "the results", "score is 0.5, and was sealed as 1.0")),
        ({"score": None}, ("env-1", "the results", "score is null, and was sealed as 1.0")),
        ({"task": "other"}, ("env-1", "the results", "task is 'other', and was sealed as 'main'")),
        ({"agent_files": ""}, ("env-1", "the results", f"agent_files is '', and was sealed as '{'a' * 64}'")),
        ({"family_version": "2"}, ("env-1", "the results", "family_version is '2', and was sealed as '1'")),
        ({"agent_exit_code": 1}, ("env-1", "the results", "agent_exit_code is 1, and was sealed as 0")),
        ({"images": ""}, ("env-1", "the results", "images is '', and was sealed as a mapping of 1")),
        ({"recording": "0" * 64}, ("env-1", "manifest.json", "it is not the one whose hash was published")),
        ({"recording": ""}, ("env-1", "the results", "they carry no hash of its recording")),
        ({"environment": "env-2"}, ("env-2", "manifest.json", "its sealed logs are not here")),
    ],
    ids=["score", "no-score", "task", "agent", "version", "exit-code", "images", "head", "no-head", "environment"],
)
def test_an_altered_row_is_noticed_without_a_seal(
    published: Path, changes: dict[str, Any], problem: tuple[str, str, str]
) -> None:
    assert said(with_row(published, **changes)) == [problem]


def test_a_row_without_score_and_hash_is_noticed(published: Path) -> None:
    problem = ("env-1", "the results", "they carry no hash of its recording")
    assert said(with_row(published, score=None, recording="")) == [problem]


def test_true_is_no_score(published: Path) -> None:
    assert [message for _, _, message in said(with_row(published, score=True))] == [
        "score is true, and was sealed as 1.0"
    ]


def test_other_results_beside_the_sealed_ones_are_noticed(published: Path) -> None:
    other = published.with_name("best.jsonl")
    other.write_text(published.read_text().splitlines()[0])
    assert said(other) == [("best.jsonl", "best.jsonl", "it is not among the files that are sealed here")]


def test_a_score_that_is_not_a_number_is_none(published: Path) -> None:
    facts = {**FACTS, "score": float("nan")}
    head = seal(published.parent / "env-1", facts, write_atomically)
    assert said(with_row(published, score=None, recording=head)) == []


def test_the_result_of_one_run_is_checked_as_it_was_printed(published: Path) -> None:
    head = json.loads(published.read_text().splitlines()[0])["recording"]
    (published.parent / "manifest.json").unlink()
    published.write_text(json.dumps({"environment": "env-1", "score": 1.0, "recording": head}, indent=2))
    assert [each.name for each in check(published)] == ["env-1"]
    assert said(published) == []


def test_a_log_that_was_altered_or_added_is_named(published: Path) -> None:
    (published.parent / "env-1" / "agent.log").write_text("solveD\n")
    (published.parent / "env-1" / "more.log").touch()
    assert said(published) == [
        ("env-1", "agent.log", "its contents have changed"),
        ("env-1", "'more.log'", "it was added later"),
    ]


@pytest.mark.parametrize("kind", ["fifo", "directory", "empty", "text"])
def test_what_holds_no_results_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "results.jsonl"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.write_text("" if kind == "empty" else "x\n")
    with pytest.raises((ValueError, OSError)):
        check(path)
