"""The example suite on real machines, its controller killed again and again: each run ends once, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from provisioner.store.files import is_locked
from provisioner.store.home import Home
from tests.command_line import CLI, ROOT, provisioner, variables
from tests.homes import borrow_images
from tests.local.test_interruptions import FAMILY, assert_nothing_left

# One after the other: each has two machines at once.
pytestmark = [pytest.mark.vm, pytest.mark.xdist_group("suite"), pytest.mark.timeout(3600)]
WRITER = ROOT / "tests" / "contract" / "agents" / "writer"
SUITE = ROOT / "examples" / "batch" / "suite.yaml"
ONE_TASK = [{"path": str(ROOT / "examples" / "number_guess"), "tasks": ["easy"]}]
# Of each of the suite's six kinds of run; the campaign soak runs two, as the suite says.
REPETITIONS = int(os.environ.get("PROVISIONER_TEST_REPETITIONS", "1"))
RUNS = 6 * REPETITIONS
EXPECTED = {
    ("easy", "counting"): ("scored", 1.0),
    ("easy", "crashing"): ("agent_failed", 0.59),
    ("easy", "hanging"): ("timed_out", 0.98),
    ("total", "counting"): ("scored", 1.0),
    ("total", "crashing"): ("agent_failed", 0.0),
    ("total", "hanging"): ("timed_out", 0.0),
}


@pytest.fixture
def home(tmp_path: Path, test_home: Home) -> Iterator[Home]:
    """A home of its own, with the tests' images; whatever the test does, no machine outlives it."""
    home = borrow_images(test_home, tmp_path / "home")
    yield home
    provisioner(home, "destroy", "--all")


def agents() -> list[dict[str, str]]:
    """The example suite's agents: one works, one crashes, one hangs."""
    example: list[dict[str, str]] = yaml.safe_load(SUITE.read_text())["agents"]
    return [agent | {"directory": str(SUITE.parent / agent["directory"])} for agent in example]


def suite(directory: Path, **changes: Any) -> Path:
    """The example suite, with its paths made absolute, and an agent's limit that tests can wait for."""
    data = yaml.safe_load(SUITE.read_text())
    for entry in data["families"]:
        entry["path"] = str((SUITE.parent / entry["path"]).resolve())
    data["agents"] = agents()
    data["limits"]["agent"] = "60s"  # on a busy host, an honest agent takes a quarter of it
    path = directory / "suite.yaml"
    path.write_text(yaml.safe_dump(data | changes))
    return path


def started(home: Home, *arguments: str) -> subprocess.Popen[bytes]:
    """A controller in a session of its own, as at a terminal."""
    return subprocess.Popen(
        [*CLI, "batch", *arguments], env=variables(home), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def records(home: Home) -> list[dict[str, Any]]:
    """The records of the environments that live."""
    environments = []
    for path in home.environments.glob("*/environment.json"):
        try:
            environments.append(json.loads(path.read_text()))
        except OSError:
            continue
    return environments


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float = 1800) -> None:
    """Waits until something is so, while the controller lives."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the controller ended"
        assert time.monotonic() < deadline
        time.sleep(0.1)


def told(home: Home, *arguments: str, code: int = 0) -> Any:
    """The JSON object of a batch command."""
    done = provisioner(home, "batch", *arguments, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def ledger(home: Home) -> dict[str, Any]:
    return dict(json.loads(provisioner(home, "costs", "--json").stdout))


@pytest.mark.story
def test_four_runs_whose_controller_is_killed_once_end_once_each(home: Home, tmp_path: Path) -> None:
    family = {"path": str(FAMILY), "tasks": ["main"]}
    writing = {"name": "writing", "directory": str(WRITER), "command": "bash write.sh"}
    failing = "echo 0.25 > ~/submission.txt; exit 3"
    crashing = {"name": "crashing", "directory": str(WRITER), "command": failing}
    limits = {"ttl": "20m", "agent": "10m"}
    path = suite(tmp_path, families=[family], agents=[writing, crashing], repetitions=2, limits=limits)
    process = started(home, "run", str(path))
    wait_for(lambda: any(record["agent_at"] for record in records(home)), process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    [batch] = [path.name for path in home.batches.iterdir()]
    told_again = told(home, "resume", batch)
    rows = {row["key"]: row for row in told_again["rows"]}
    assert len(told_again["rows"]) == len(rows) == 4
    outcomes = sorted((row["agent"], row["outcome"], row["score"]) for row in rows.values())
    assert outcomes == [("crashing", "agent_failed", 0.25)] * 2 + [("writing", "scored", 0.75)] * 2
    costs = ledger(home)
    assert costs["reserved_usd"] == 0
    launched = {entry["environment"] for entry in costs["entries"] if entry["kind"] == "task"}
    assert launched >= {row["environment"] for row in rows.values()}
    assert_nothing_left(home)


def test_a_suite_with_killed_controllers_ends_each_run_once(home: Home, tmp_path: Path) -> None:
    moments: list[Callable[[], bool]] = [
        # While Terraform creates, which it then finishes by itself; while an agent works; and once some runs have
        # ended and others are on their way.
        lambda: any(record["status"] == "creating" and record["stack"] != record["id"] for record in records(home)),
        lambda: any(record["agent_at"] for record in records(home)),
        lambda: (
            2 * len([*home.archive.iterdir()]) >= RUNS and any(record["status"] == "ready" for record in records(home))
        ),
    ]
    process = started(home, "run", str(suite(tmp_path, repetitions=REPETITIONS)))
    for moment in moments:
        wait_for(moment, process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        [batch] = [path.name for path in home.batches.iterdir()]
        process = started(home, "resume", batch)
    try:
        wait_for(lambda: told(home, "status", batch)["at_work"], process)
        assert process.wait(timeout=2400) == 0
        assert told(home, "status", batch)["ended"] == RUNS
    finally:
        process.kill()

    lines = (home.batches / batch / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == len({row["key"] for row in rows}) == RUNS
    for row in rows:
        outcome, score = EXPECTED[row["task"], row["agent"]]
        assert (row["outcome"], row["score"]) == (outcome, pytest.approx(score)), row
        assert row["agent_exit_code"] == {"scored": 0, "agent_failed": 3}.get(outcome)
        assert row["images"]["primary"].startswith("family-")
        logs = home.archive / row["environment"] / "logs"
        assert (logs / "agent.log").exists()
        assert (logs / "console-primary.log").exists()
        assert "systemd" in (logs / "journal-primary.log").read_text()
    assert any(row["attempts"] > 1 for row in rows)
    assert_nothing_left(home)

    # Each attempt was launched once and is settled; the results name the last one of each run.
    costs = ledger(home)
    entries = [entry for entry in costs["entries"] if entry["batch"] == batch and entry["kind"] == "task"]
    assert costs["reserved_usd"] == 0
    assert all(entry["actual_usd"] is not None for entry in entries)
    assert {row["environment"] for row in rows} <= {entry["environment"] for entry in entries}
    assert len(entries) <= sum(row["attempts"] for row in rows)

    again = told(home, "resume", batch)
    assert [row["environment"] for row in again["rows"]] == [row["environment"] for row in rows]
    state = told(home, "status", batch)
    assert (state["ended"], state["running"], state["environments"]) == (RUNS, [], [])
    page = tmp_path / "page.html"
    assert provisioner(home, "batch", "report", batch, "--output", str(page)).returncode == 0
    text = page.read_text()
    assert "the agent ran out of time" in text
    # Of each run, the page has what was kept of it.
    for title, least in (("Instructions", RUNS), ("The agent&#39;s output", RUNS), ("Score log", RUNS // 2)):
        assert text.count(f"<h3>{title}</h3>") >= least, title
    assert "<h3>Submission</h3>" in text
    assert all(row["score_log"] for row in rows if row["task"] == "easy")
    exported = told(home, "export", batch, "--inspect")
    assert len(exported["logs"]) == len({(row["family"], row["agent"]) for row in rows})


def test_ctrl_c_clears_away_and_a_resumed_batch_can_end(home: Home, tmp_path: Path) -> None:
    limits = {"ttl": "20m", "agent": "10m"}
    hanging_first = agents()[::-1]
    path = suite(tmp_path, families=ONE_TASK, agents=hanging_first, concurrency=1, repetitions=1, limits=limits)
    process = started(home, "run", str(path))
    wait_for(lambda: any(record["agent_at"] for record in records(home)), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=300) == 130
    assert_nothing_left(home)
    [batch] = [path.name for path in home.batches.iterdir()]
    assert not is_locked(home.batches / batch / "controller.lock")
    assert ledger(home)["reserved_usd"] == 0

    process = started(home, "resume", batch)
    wait_for(lambda: bool(records(home)), process)
    graceful = told(home, "cancel", batch)
    assert len(graceful["cancelled"]) == 2
    forced = told(home, "cancel", batch, "--force")
    assert len(forced["cancelled"]) == 1
    assert process.wait(timeout=300) == 130
    assert_nothing_left(home)
    rows = [json.loads(line) for line in (home.batches / batch / "results.jsonl").read_text().splitlines()]
    assert [row["outcome"] for row in rows] == ["cancelled"] * 3


def test_cancelling_by_force_removes_what_was_left(home: Home, tmp_path: Path) -> None:
    process = started(home, "run", str(suite(tmp_path, families=ONE_TASK, concurrency=1, repetitions=1)))
    wait_for(lambda: any(record["endpoints"] for record in records(home)), process)
    process.kill()
    process.wait()
    [batch] = [path.name for path in home.batches.iterdir()]
    [left] = [record["id"] for record in records(home)]
    cancelled = told(home, "cancel", batch, "--force")
    assert cancelled["removed"] == [left]
    assert len(cancelled["cancelled"]) == 3
    assert_nothing_left(home)
    assert ledger(home)["reserved_usd"] == 0


def machines_of(home: Home, environment: str) -> list[int]:
    """Returns the processes of an environment's machines."""
    directory = home.environments / environment
    return sorted(int(path.name) for path in Path("/proc").glob("[0-9]*") if is_machine(path, directory))


def test_a_machine_that_is_lost_under_an_agent_is_replaced(home: Home, tmp_path: Path) -> None:
    hanging = agents()[-1:]
    path = suite(tmp_path, families=ONE_TASK, agents=hanging, repetitions=1, concurrency=1)
    process = started(home, "run", str(path))
    try:
        wait_for(lambda: any(record["agent_at"] for record in records(home)), process)
        wait_for(lambda: bool(list(home.environments.glob("*/logs/agent.log"))), process)
        [lost] = [record["id"] for record in records(home) if record["agent_at"]]
        machines = machines_of(home, lost)
        assert machines
        for pid in machines:
            os.kill(pid, signal.SIGTERM)  # which QEMU records: a machine cannot have killed it so
        assert process.wait(timeout=900) == 0
    finally:
        process.kill()
    [row] = [json.loads(line) for line in next(home.batches.glob("*/results.jsonl")).read_text().splitlines()]
    assert (row["outcome"], row["attempts"]) == ("timed_out", 2)
    assert row["score"] == pytest.approx(0.98)
    assert row["environment"] != lost
    assert "agent.log" in [path.name for path in (home.archive / lost / "logs").iterdir()]
    assert_nothing_left(home)


def is_machine(process: Path, directory: Path) -> bool:
    """Whether a process is QEMU at work in an environment's directory."""
    try:
        inside = (process / "cwd").readlink().is_relative_to(directory)
        return inside and (process / "comm").read_text().startswith("qemu")
    except OSError:
        return False
