"""Attacks on `verify`: results and sealed logs of strangers, which lie about each other, or cost time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from provisioner.recording import manifest
from provisioner.recording.manifest import MANIFEST, load, seal
from provisioner.recording.published import MAXIMUM_PROBLEMS, check_results
from provisioner.store.files import write_atomically
from tests.unit.conftest import CommandLine

ROOT = Path(__file__).parents[2]


def sealed(parent: Path, name: str, **facts: Any) -> dict[str, Any]:
    """Seals the logs of one environment, and returns the row that a result of it would be."""
    logs = parent / name
    logs.mkdir()
    (logs / "agent.log").write_text(name)
    head = seal(logs, {"environment": name, "score": 1.0, **facts}, write_atomically)
    return {"environment": name, "outcome": "scored", "score": 1.0, "recording": head}


def results(parent: Path, *rows: dict[str, Any]) -> Path:
    path = parent / "results.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def said(path: Path) -> list[tuple[str, str]]:
    checked = check_results(path, lambda name: [path.parent / name])
    return [(each.name, problem.message) for each in checked for problem in each.problems]


def test_two_runs_whose_recordings_were_swapped_are_noticed(tmp_path: Path) -> None:
    first, second = sealed(tmp_path, "env-1"), sealed(tmp_path, "env-2")
    first["recording"], second["recording"] = second["recording"], first["recording"]
    (tmp_path / "env-1").rename(tmp_path / "env-3")
    (tmp_path / "env-2").rename(tmp_path / "env-1")
    (tmp_path / "env-3").rename(tmp_path / "env-2")
    assert said(results(tmp_path, first, second)) == [
        ("env-1", "environment is 'env-1', and was sealed as 'env-2'"),
        ("env-2", "environment is 'env-2', and was sealed as 'env-1'"),
    ]


def test_one_run_does_not_count_as_several(tmp_path: Path) -> None:
    row = sealed(tmp_path, "env-1")
    assert said(results(tmp_path, row, row | {"key": "another"})) == [
        ("env-1", "an earlier row has the same environment")
    ]


def test_a_scored_run_is_not_skipped_for_want_of_a_score(tmp_path: Path) -> None:
    row = sealed(tmp_path, "env-1") | {"score": None, "recording": ""}
    assert said(results(tmp_path, row)) == [("env-1", "they carry no hash of its recording")]


@pytest.mark.parametrize("outcome", [[], {}, 7, None, "x" * 1000, "cancelled"])
def test_a_run_that_says_of_no_machine_has_nothing_to_check(tmp_path: Path, outcome: Any) -> None:
    row = {"environment": "env-1", "score": None, "recording": "", "outcome": outcome}
    assert check_results(results(tmp_path, row), lambda _: []) == []


def test_true_is_no_score(tmp_path: Path) -> None:
    row = sealed(tmp_path, "env-1") | {"score": True}
    assert said(results(tmp_path, row)) == [("env-1", "score is true, and was sealed as 1.0")]


def test_a_seal_that_names_no_results_does_not_cover_them(tmp_path: Path) -> None:
    row = sealed(tmp_path, "env-1")
    path = results(tmp_path, row)
    seal(tmp_path, {}, write_atomically, ("results.jsonl",))
    other = path.rename(tmp_path / "best.jsonl")
    results(tmp_path, row)
    assert said(other) == [("best.jsonl", "it is not among the files that are sealed here")]


def test_a_link_that_leads_to_itself_is_no_error_of_ours(provisioner: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "env").symlink_to("env")
    path = results(tmp_path, {"environment": "env", "score": 1.0, "recording": "0" * 64})
    done = provisioner("verify", str(path))
    assert (done.code, "its sealed logs are not here" in done.stdout) == (1, True)


def test_links_to_one_directory_are_read_once(tmp_path: Path) -> None:
    row = sealed(tmp_path, "env-0")
    (tmp_path / "env-0" / "large.log").touch()
    os.truncate(tmp_path / "env-0" / "large.log", 256 << 20)
    row["recording"] = seal(tmp_path / "env-0", {"environment": "env-0"}, write_atomically)
    for number in range(1, 1000):
        (tmp_path / f"env-{number}").symlink_to("env-0")
    path = results(tmp_path, *(row | {"environment": f"env-{number}"} for number in range(1, 1000)))
    begin = time.process_time()
    assert len(said(path)) == 999 * 2  # the environment, and the score
    assert time.process_time() - begin < 20


def test_empty_sealed_files_of_terabytes_are_refused(tmp_path: Path) -> None:
    entry = {"bytes": manifest.MAX_FILE_BYTES, "sha256": "0" * 64, "previous": "0" * 64}
    entries = [entry | {"name": f"{number}.log"} for number in range(1000)]
    (tmp_path / MANIFEST).write_text(json.dumps({"version": 1, "facts": {}, "entries": entries, "head": "0" * 64}))
    with pytest.raises(ValueError, match="more bytes"):
        load(tmp_path)


def test_a_few_missing_files_of_a_directory_are_named(tmp_path: Path) -> None:
    row = sealed(tmp_path, "env-1")
    for number in range(1000):
        (tmp_path / "env-1" / f"{number}.log").touch()
    row["recording"] = seal(tmp_path / "env-1", {"environment": "env-1", "score": 1.0}, write_atomically)
    for number in range(1000):
        (tmp_path / "env-1" / f"{number}.log").unlink()
    found = said(results(tmp_path, row))
    assert len(found) == MAXIMUM_PROBLEMS + 1
    assert found[-1] == ("env-1", f"{1000 - MAXIMUM_PROBLEMS} further problems are not shown")


MEMORY = """
import resource, sys
from pathlib import Path
from provisioner.recording.published import check_results
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
print(len(check_results(Path(sys.argv[1]), lambda name: [])))
[peak] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
print(int(peak.split()[1]) // 1024)
"""


@pytest.mark.campaign
def test_rows_with_huge_values_take_the_memory_of_one(tmp_path: Path) -> None:
    row = {"environment": "e", "recording": "x", "images": [[]] * 400_000}
    path = results(tmp_path, *[row] * 20)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    rows, mebibytes = done.stdout.split()
    assert rows == "20"
    assert int(mebibytes) < 300
