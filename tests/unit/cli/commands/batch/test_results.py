"""What a batch comes to as the result of a command."""

from __future__ import annotations

import fcntl
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from provisioner.base.errors import UsageError
from provisioner.batch.records import Batches
from provisioner.batch.results import Row
from provisioner.cli.commands.batch.report import write_report
from provisioner.cli.commands.batch.results import final_result
from provisioner.store.home import Home
from tests.command_line import ROOT
from tests.unit.batch.samples import batch, run, suite

SUITE = suite(cloud="aws")
RUN = run()
BATCH = batch(suite=SUITE)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.make()
    Batches(home).save(BATCH)
    return home


def row(outcome: str) -> Row:
    values = {"key": RUN.key, "family": "fam", "task": "main", "agent": "one", "repetition": 1, "outcome": outcome}
    return Row.model_validate({**values, "score": 1.0 if outcome == "scored" else None})


@pytest.mark.parametrize(
    ("outcomes", "exit_code"),
    [
        (["scored", "task_failed", "agent_failed", "timed_out"], 0),
        (["scored", "cancelled"], 130),
        (["cancelled", "over_budget"], 8),
        (["over_budget", "infrastructure_failed", "cancelled"], 5),
    ],
    ids=["by-itself", "cancelled", "budget", "infrastructure"],
)
def test_the_exit_code_is_0_unless_infrastructure_failed(home: Home, outcomes: list[str], exit_code: int) -> None:
    assert final_result(home, BATCH, [row(outcome) for outcome in outcomes], (0, 0)).exit_code == exit_code


def test_a_finished_batch_shows_its_scores_and_names_its_files(home: Home) -> None:
    result = final_result(home, BATCH, [row("scored"), row("scored"), row("task_failed")], (10_000, 20_000))
    assert "1.00 ± 0.00    2 scored, 1 task_failed" in result.text
    assert "batch:   b-1, 0.0200 USD spent\n" in result.text
    local = BATCH.model_copy(update={"suite": SUITE.model_copy(update={"cloud": "local"})})
    assert "batch:   b-1\n" in final_result(home, local, [row("scored")], (10_000, 20_000)).text
    assert "batch:   b-1, 0.0000 USD spent\n" in final_result(home, BATCH, [row("scored")], (0, 0)).text
    assert (result.data["reserved_usd"], result.data["spent_usd"], result.data["ended"]) == (0.01, 0.02, 3)
    assert Path(result.data["report"]).exists()


def test_a_page_that_cannot_be_written_hides_no_result(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    before = write_report(home, BATCH, [], None).read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    result = final_result(home, BATCH, [row("infrastructure_failed"), row("scored")], (0, 0))
    assert (result.exit_code, result.data["report"]) == (5, None)
    assert "report.html cannot be written: No space left on device." in result.text
    assert (Batches(home).directory("b-1") / "report.html").read_bytes() == before


def test_the_page_is_utf_8_whatever_the_locale_is(home: Home, tmp_path: Path) -> None:
    lost = row("infrastructure_failed").model_copy(update={"message": "\N{REPLACEMENT CHARACTER}"})
    program = (
        "import pickle, sys; from provisioner.cli.commands.batch.report import write_report; "
        "write_report(*pickle.load(sys.stdin.buffer))"
    )
    given = pickle.dumps((home, BATCH, [lost], tmp_path / "report.html"))
    locale = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", program], input=given, env=locale, cwd=ROOT, check=True)
    assert "\N{REPLACEMENT CHARACTER}" in (tmp_path / "report.html").read_text("utf-8")


def test_the_page_can_go_into_a_pipe(home: Home) -> None:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 20)
    with os.fdopen(read, encoding="utf-8") as pipe:
        with os.fdopen(write, "wb"):
            assert write_report(home, BATCH, [], Path(f"/dev/fd/{write}")) == Path(f"/dev/fd/{write}")
        assert pipe.read().startswith("<!doctype html>")


def test_a_report_that_cannot_be_written_is_the_users_mistake(home: Home, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        write_report(home, BATCH, [], tmp_path / "missing" / "report.html")
