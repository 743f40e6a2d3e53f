"""Two workers, each with a home of its own, on one Postgres: one queue, one budget, one limit; one worker is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from provisioner.costs.ledger_postgres import PostgresLedger
from provisioner.store.home import Home
from tests.aws.loopback import AccountOfMany
from tests.batch import many, postgres
from tests.command_line import CLI

pytestmark = [pytest.mark.xdist_group("workers"), pytest.mark.timeout(1500)]
RUNS = 6
AT_ONCE = 3


@dataclass
class Site:
    """An account, a database, and what the workers are told."""

    directory: Path
    url: str
    database: str
    most_running: int = 0
    most_counted: int = 0
    launches: list[str] = field(default_factory=list)

    def variables(self, home: str) -> dict[str, str]:
        shared = {"PROVISIONER_DATABASE": self.database}
        return many.variables(self.url, self.directory / home, self.directory) | shared

    def start(self, home: str, *arguments: str) -> subprocess.Popen[str]:
        log = (self.directory / f"{home}.log").open("a")
        with log:
            return subprocess.Popen(
                [*CLI, "batch", *arguments], env=self.variables(home), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip

    def start_worker(self, home: str) -> subprocess.Popen[str]:
        """Starts a worker that offers what the suites of write_suite name."""
        directory = self.directory
        (directory / "many").mkdir(exist_ok=True)
        (directory / "agent").mkdir(exist_ok=True)
        return self.start(
            home, "worker", "--families", str(directory / "many"), "--agents", str(directory / "agent")
        )  # fmt: skip

    def told(self, home: str, *arguments: str) -> Any:
        process = self.start(home, *arguments, "--json")
        out, _ = process.communicate(timeout=600)
        assert process.returncode == 0, (self.directory / f"{home}.log").read_text()[-3000:]
        return json.loads(out)

    def suite(self, name: str, runs: int, **more: Any) -> str:
        # Long enough to be met at work.
        return many.write_suite(self.directory, name, "sleep 16", repetitions=runs, concurrency=AT_ONCE, **more)

    def look(self, batch: str) -> None:
        """Notes how many machines run, and what counts against the budget."""
        self.most_running = max(self.most_running, len(many.instances(self.url)))
        entries = [entry for entry in PostgresLedger(self.database).entries() if entry.batch == batch]
        self.most_counted = max(self.most_counted, sum(entry.counted_micro_usd for entry in entries))


@pytest.fixture
def site(tmp_path: Path, account: AccountOfMany, prepared: Home) -> Iterator[Site]:
    for home in ("one", "two"):
        many.knowing(prepared, tmp_path / home)
    with postgres.serving() as database:
        yield Site(tmp_path, account.url, database)


def test_a_killed_workers_runs_are_ended_by_the_other(site: Site, prepared: Home) -> None:
    held = many.reserved_micro_usd(prepared)
    budget = held * (AT_ONCE + 1)
    suite = site.suite("second", RUNS, budget=str(budget / 1_000_000))
    assert budget < RUNS * held

    worker = site.start_worker("two")
    owner = site.start("one", "run", suite, "--json")
    try:
        killed: list[str] = []
        while owner.poll() is None:
            batches = [path.name for path in (site.directory / "one" / "batches").glob("second-*")]
            if batches:
                site.look(batches[0])
            # Not while it creates: what it may still be making would be waited for, ten minutes.
            coming = [record for record in many.records(site.directory / "two") if record["status"] == "creating"]
            if not killed and not coming and (killed := many.working(site.directory / "two")):
                os.kill(worker.pid, signal.SIGKILL)
                worker.wait()
            time.sleep(0.3)
        out, _ = owner.communicate()
    finally:
        for process in (worker, owner):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    assert owner.returncode == 0, (site.directory / "one.log").read_text()[-3000:]
    told = json.loads(out)
    assert killed
    assert told["outcomes"] == {"scored": RUNS}
    assert len({row["key"] for row in told["rows"]}) == RUNS
    # What the killed one had begun was begun again, and nothing is left of it.
    assert sum(row["attempts"] for row in told["rows"]) > RUNS
    assert not set(killed) & {row["environment"] for row in told["rows"]}
    assert many.instances(site.url) == []
    entries = [one for one in PostgresLedger(site.database).entries() if one.batch == told["batch"]]
    assert {one.environment for one in entries} >= set(killed)
    assert all(one.actual_micro_usd is not None for one in entries)
    assert told["reserved_usd"] == 0
    # The limit and the budget were those of both together.
    assert 1 < site.most_running <= AT_ONCE
    assert site.most_counted <= budget


def test_an_interrupted_worker_hands_its_runs_back(site: Site) -> None:
    worker = site.start_worker("two")
    owner = site.start("one", "run", site.suite("handed", 6), "--json")
    try:
        while owner.poll() is None and not (handed := many.working(site.directory / "two")):
            time.sleep(0.2)
        worker.send_signal(signal.SIGINT)
        worker.communicate(timeout=300)
        assert worker.returncode == 130
        # Before it ended, what it ran was gone.
        assert many.records(site.directory / "two") == []
        out, _ = owner.communicate(timeout=600)
    finally:
        for process in (worker, owner):
            process.kill()
            process.wait()
    assert owner.returncode == 0, (site.directory / "one.log").read_text()[-3000:]
    told = json.loads(out)
    assert told["outcomes"] == {"scored": 6}
    assert told["reserved_usd"] == 0
    assert not set(handed) & {row["environment"] for row in told["rows"]}
    assert many.instances(site.url) == []


def test_a_run_beyond_the_budget_waits_or_is_refused(site: Site, prepared: Home) -> None:
    tight = str(many.reserved_micro_usd(prepared) * 1.5 / 1_000_000)
    told = site.told("one", "run", site.suite("tight", 2, budget=tight))
    assert told["outcomes"] == {"scored": 2}
    entries = [entry for entry in PostgresLedger(site.database).entries() if entry.batch == told["batch"]]
    first, second = sorted(entries, key=lambda entry: entry.launched_at)
    assert first.ended_at is not None
    assert second.launched_at >= first.ended_at  # the second waited until the first had settled
    process = site.start("one", "run", site.suite("none", 2, budget="0.000001"), "--json")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 8
    refused = json.loads(out)
    assert refused["outcomes"] == {"over_budget": 2}
    assert "more than" in refused["rows"][0]["message"]
    assert many.instances(site.url) == []
