"""Shows that failed samples and evals are tried again, in every way that Inspect has, and leave nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import tarfile
from pathlib import Path

import pytest
from inspect_ai.log import EvalSample, list_eval_logs, read_eval_log
from inspect_ai.util._restic import resolver

from provisioner.store.home import Home
from tests.command_line import ROOT
from tests.inspect.evals import FLAG
from tests.inspect.running import TASKS, assert_nothing_left, command, evals, said, started, wait_for

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("evals"),
    pytest.mark.filterwarnings("default"),  # Inspect's own deprecations
]


@pytest.fixture(autouse=True)
def all_settled(home: Home) -> None:
    """Checks that nothing is there before, so that what a test finds is its own."""
    assert evals(home) == []


# What the error of each sample of failing.py says.
SAID = {
    "image": "run echo 1; false exited with code 1",
    "boot": "did not come up",
    "isolation": "isolation",
    "start": "start() raised ValueError: on purpose",
    "files": "/proc/no/such/file",
    "setup": "it is not set up",
}
# Before a machine is up, in start(), and after it; the campaign soak tries all.
TRIED = set(SAID) if os.environ.get("PROVISIONER_TEST_STEPS") == "all" else {"image", "boot", "start", "setup"}


@pytest.mark.timeout(1800)
def test_a_sample_that_fails_at_any_step_leaves_nothing(home: Home, tmp_path: Path) -> None:
    retry = ("--retry-on-error", "1", "--no-fail-on-error")
    only = ("--sample-id", ",".join(sorted(TRIED)))
    output = said(started(tmp_path, "failing.py@in_each_step", *retry, *only), seconds=1400)
    [written] = tmp_path.glob("*.eval")
    samples = {str(sample.id): sample for sample in read_eval_log(str(written)).samples or []}
    assert set(samples) == TRIED, output
    for step, sample in samples.items():
        errors = [str(error) for error in (sample.error, *(sample.error_retries or []))]
        assert len(errors) == 2, (step, errors)
        assert all(SAID[step] in error for error in errors), (step, errors)
        events = [event.data for event in sample.events if event.event == "info" and event.source == "provisioner"]
        told = [data for data in events if isinstance(data, dict) and "did_not_come_up" in data]
        assert bool(told) == (step not in ("files", "setup")), (step, events)
    assert_nothing_left(home, output)


def test_a_set_tries_an_eval_that_failed_once_again(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FLAG, str(tmp_path / "flag"))
    options = ("--model", "mockllm/model", "--display", "plain", "--log-dir", str(tmp_path / "set"))
    of_set = command("eval-set", f"{TASKS}@fails_at_first", *options, "--retry-attempts", "2", "--no-retry-cleanup")
    done = subprocess.run(of_set, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [read_eval_log(info) for info in list_eval_logs(str(tmp_path / "set"))]
    assert sorted(log.status for log in logs) == ["error", "success"], done.stdout + done.stderr
    [failed] = [log for log in logs if log.status == "error"]
    assert failed.error is not None
    assert "not yet" in failed.error.message
    assert_nothing_left(home)


def test_an_interrupted_eval_is_retried_elsewhere(home: Home, tmp_path: Path) -> None:
    family = os.path.relpath(ROOT / "examples" / "number_guess", tmp_path)
    arguments = ("-T", f"family={family}", "-T", "task=easy", "--solver", "provisioner/replay_agent")
    process = started(tmp_path, "provisioner/task_family", *arguments)
    wait_for(home, process, "creating")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output = said(process)
    assert_nothing_left(home, output)
    [written] = tmp_path.glob("*.eval")
    assert read_eval_log(str(written)).status == "cancelled", output
    sample = _retry(written, tmp_path / "elsewhere")
    assert sample.scores is not None
    assert sample.scores["score_metr_task"].value == 0.0  # no guess was made
    assert_nothing_left(home)


@pytest.mark.skipif(not hasattr(tarfile, "FilterError"), reason="Inspect's checkpoints need Python 3.11.4")
def test_a_retried_eval_continues_from_its_checkpoint(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _provide_restic(tmp_path)
    # Not the working directory: Inspect would write its checkpoints to the root directory.
    logs = tmp_path / "logs"
    output = said(started(tmp_path, "continues_from_a_checkpoint", "--log-dir", str(logs)))
    [written] = logs.glob("*.eval")
    failed = read_eval_log(str(written))
    assert (failed.status, failed.error and failed.error.message) == ("error", "RuntimeError('on purpose')"), output
    assert_nothing_left(home, output)
    assert _retry(written, tmp_path / "elsewhere").output.completion == "640\nfirst second"
    assert_nothing_left(home)


def _retry(failed: Path, directory: Path) -> EvalSample:
    """Retries the eval of a log in a new working directory, and returns its one sample."""
    directory.mkdir()
    retried = command("eval-retry", str(failed), "--display", "plain", "--log-dir", "logs")
    done = subprocess.run(retried, cwd=directory, capture_output=True, text=True, check=False)
    [written] = directory.glob("logs/*.eval")
    log = read_eval_log(str(written))
    assert log.status == "success", done.stdout + done.stderr
    [sample] = log.samples or []
    return sample


def _provide_restic(tmp_path: Path) -> None:
    """Puts Debian 13's restic where Inspect keeps the one that it downloads from GitHub. Debian 12's is too old."""
    apt = tmp_path / "apt"
    (apt / "lists" / "partial").mkdir(parents=True)
    key = "/usr/share/keyrings/debian-archive-trixie-stable.gpg"
    (apt / "sources.list").write_text(f"deb [signed-by={key}] http://deb.debian.org/debian trixie main\n")
    settings = [f"Dir::Etc::SourceList={apt}/sources.list", f"Dir::State::Lists={apt}/lists", f"Dir::Cache={apt}"]
    options = [f"--option={setting}" for setting in (*settings, "Dir::Etc::SourceParts=/dev/null")]
    for arguments in (["update"], ["download", "restic"]):
        subprocess.run(["apt-get", *options, *arguments], cwd=apt, capture_output=True, check=True)
    [package] = apt.glob("restic_*.deb")
    subprocess.run(["dpkg-deb", "-x", package, apt / "restic"], check=True)
    wanted = resolver.cache_path("linux_amd64")
    wanted.parent.mkdir(parents=True, exist_ok=True)
    (apt / "restic" / "usr" / "bin" / "restic").rename(wanted)
