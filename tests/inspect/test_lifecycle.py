"""Shows what is left after evals that end in every way: nothing, or what they were asked to leave."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from inspect_ai.log import read_eval_log

from provisioner.store.home import Home
from tests.inspect.evals import FLAG
from tests.inspect.failing import WAYS
from tests.inspect.running import assert_nothing_left, command, evals, said, started, wait, wait_for

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


def test_however_a_sample_ends_nothing_is_left(home: Home, tmp_path: Path) -> None:
    output = said(started(tmp_path, "failing.py@in_each_way", "--no-fail-on-error"))
    [written] = tmp_path.glob("*.eval")
    errors = {str(sample.id): str(sample.error) for sample in read_eval_log(str(written)).samples or []}
    assert set(errors) == set(WAYS), output
    assert "on purpose" in errors["raises"]
    assert "SandboxUnavailableError" in errors["killed from outside"]
    assert "SandboxUnavailableError" in errors["loses its exec server"]
    assert_nothing_left(home, output)


def test_a_time_limit_ends_a_command_and_the_machine(home: Home, tmp_path: Path) -> None:
    said(started(tmp_path, "sleeps"))
    [written] = tmp_path.glob("*.eval")
    [sample] = read_eval_log(str(written)).samples or []
    assert sample.limit is not None
    assert sample.limit.type == "time"
    assert evals(home) == []


def test_an_interrupted_eval_under_trio_leaves_nothing(home: Home, tmp_path: Path) -> None:
    process = started(tmp_path, "sleeps_for_long", variables={"INSPECT_ASYNC_BACKEND": "trio"})
    wait_for(home, process, "ready")
    os.killpg(process.pid, signal.SIGINT)
    output = said(process)
    assert_nothing_left(home, output)
    [written] = tmp_path.glob("*.eval")
    assert read_eval_log(str(written), header_only=True).status == "cancelled", output


@pytest.mark.parametrize("task", ["scores_for_long", "is_destroyed_slowly"])
def test_an_eval_interrupted_at_its_end_leaves_nothing(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    flag = tmp_path / "flag"
    monkeypatch.setenv(FLAG, str(flag))
    process = started(tmp_path, task)
    wait(process, flag.exists)
    process.send_signal(signal.SIGINT)
    output = said(process)
    assert_nothing_left(home, output)


def test_what_a_second_interrupt_leaves_is_found(home: Home, tmp_path: Path) -> None:
    process = started(tmp_path, "sleeps_for_long")
    wait_for(home, process, "ready")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    said(process)
    subprocess.run(command("sandbox", "cleanup", "provisioner"), capture_output=True, check=True)
    assert_nothing_left(home)


def test_a_killed_evals_machines_are_found_and_destroyed(home: Home, tmp_path: Path) -> None:
    process = started(tmp_path, "sleeps_for_long")
    wait_for(home, process, "ready")
    [identity] = evals(home)
    refused = subprocess.run(
        command("sandbox", "cleanup", "provisioner", identity), capture_output=True, text=True, check=False
    )
    assert "running eval uses" in refused.stdout + refused.stderr
    assert evals(home) == [identity]
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    cleaned = subprocess.run(command("sandbox", "cleanup", "provisioner"), capture_output=True, text=True, check=True)
    assert f"{identity} destroyed" in cleaned.stdout
    assert_nothing_left(home)


def test_a_kept_sample_stays_until_it_is_cleaned_up(home: Home, tmp_path: Path) -> None:
    output = said(started(tmp_path, "services_and_files", "--no-sandbox-cleanup"))
    [identity] = evals(home)
    assert f"provisioner ssh {identity}" in output
    assert "the service says hello, red" in output
    # Debian's Python, and none of ours.
    assert "Python of /usr/lib/python3/dist-packages\n" in output
    assert re.search(r"^/usr/bin/python3\n(/usr/local/lib/python3[.]11\n)?$", output, re.MULTILINE), output
    subprocess.run(command("sandbox", "cleanup", "provisioner", identity), capture_output=True, check=True)
    assert evals(home) == []
