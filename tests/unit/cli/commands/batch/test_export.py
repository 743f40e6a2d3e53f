"""A batch's results in Inspect's format, by the command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from inspect_ai.log import list_eval_logs, read_eval_log

from provisioner.batch.records import Batches
from provisioner.store.home import Home
from tests.unit.batch.report.samples import batch, row
from tests.unit.conftest import CommandLine


@pytest.fixture
def ended(provisioner: CommandLine) -> CommandLine:
    rows = [row(1), row(2, agent="other", outcome="task_failed", score=None)]
    home = Home(provisioner.home)
    home.make()
    record = batch(*rows)
    Batches(home).save(record)
    Batches(home).write_results(record, rows)
    return provisioner


def test_the_logs_are_written_where_they_are_wanted(ended: CommandLine, tmp_path: Path) -> None:
    told = ended("batch", "export", "nightly", "--inspect", "--output", str(tmp_path / "deep" / "logs"), "--json").json
    assert (told["directory"], told["ended"]) == (str(tmp_path / "deep" / "logs"), 2)
    assert [read_eval_log(path).eval.solver for path in told["logs"]] == ["solver", "other"]
    assert len(list_eval_logs(told["directory"])) == 2
    shown = ended("batch", "export", "nightly", "--inspect")
    assert f"inspect view --log-dir {Home(ended.home).batches / 'nightly-k7x2' / 'inspect'}" in shown.stdout


def test_an_export_that_cannot_be_written_is_a_mistake(ended: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = ended("batch", "export", "nightly", "--inspect", "--output", str(tmp_path / "file"))
    assert (done.code, "cannot be written to" in done.stderr) == (2, True)
    done = ended("batch", "export", "nightly")
    assert (done.code, "--inspect" in done.stderr) == (2, True)


def test_without_inspect_the_message_says_how_to_install_it(
    ended: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "inspect_ai"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "provisioner.inspect.batch_logs", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    done = ended("batch", "export", "nightly", "--inspect")
    assert (done.code, "docs/how-to/batches.md#open-the-results-in-inspect" in done.stderr) == (3, True)


class Absent:
    """Answers as where Inspect is not installed."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == "inspect_ai":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
