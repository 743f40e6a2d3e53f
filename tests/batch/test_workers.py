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

import boto3
import pytest

from provisioner.ledger_postgres import PostgresLedger
from tests.aws.loopback import FAMILY, account_of_many
from tests.batch import postgres
from tests.command_line import CLI

pytestmark = [pytest.mark.xdist_group("workers"), pytest.mark.timeout(900)]
RUNS = 8
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
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        return kept | {
            "HOME": str(self.directory), "AWS_ENDPOINT_URL": self.url, "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x", "PROVISIONER_HOME": str(self.directory / home),
            "PROVISIONER_CONTROLLER_CIDRS": "203.0.113.10/32", "PROVISIONER_DATABASE": self.database,
        }  # fmt: skip

    def start(self, home: str, *arguments: str) -> subprocess.Popen[str]:
        log = (self.directory / f"{home}.log").open("a")
        with log:
            return subprocess.Popen(
                [*CLI, "batch", *arguments], env=self.variables(home), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip

    def told(self, home: str, *arguments: str) -> Any:
        process = self.start(home, *arguments, "--json")
        out, _ = process.communicate(timeout=600)
        assert process.returncode == 0, (self.directory / f"{home}.log").read_text()[-3000:]
        return json.loads(out)

    def suite(self, name: str, runs: int, **more: Any) -> str:
        (self.directory / "many").mkdir(exist_ok=True)
        (self.directory / "agent").mkdir(exist_ok=True)
        (self.directory / "many" / "many.py").write_text(FAMILY)
        data = {
            "name": name, "families": [{"path": "many"}], "repetitions": runs, "cloud": "aws",
            "agents": [{"name": "slow", "directory": "agent", "command": "sleep 8"}],
            "regions": ["us-east-1"], "concurrency": AT_ONCE, "limits": {"ttl": "1h"}, **more,
        }  # fmt: skip
        path = self.directory / f"{name}.yaml"
        path.write_text(json.dumps(data))
        return str(path)

    def instances(self) -> list[str]:
        client = boto3.client(
            "ec2", region_name="us-east-1", endpoint_url=self.url, aws_access_key_id="x", aws_secret_access_key="x"
        )
        found = [one for told in client.describe_instances()["Reservations"] for one in told["Instances"]]
        return [one["InstanceId"] for one in found if one["State"]["Name"] == "running"]

    def look(self, batch: str) -> None:
        """Notes how many machines run, and what counts against the budget."""
        self.most_running = max(self.most_running, len(self.instances()))
        entries = [entry for entry in PostgresLedger(self.database).entries() if entry.batch == batch]
        self.most_counted = max(self.most_counted, sum(entry.counted_micro_usd for entry in entries))

    def agents(self, home: str) -> list[str]:
        """Environments of a home in which an agent works."""
        found = []
        for path in (self.directory / home / "environments").glob("*/environment.json"):
            try:
                record = json.loads(path.read_text())
            except OSError:
                continue
            if record["agent_at"] and record["status"] == "ready":
                found.append(record["id"])
        return found


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with account_of_many(tmp_path) as url, postgres.serving() as database:
        yield Site(tmp_path, url, database)


def test_when_one_of_two_workers_is_killed_the_other_ends_its_runs_within_limit_and_budget(site: Site) -> None:
    # Images and the region's network, and what a run may cost at the most.
    first = site.told("one", "run", site.suite("first", 1))
    [entry] = [one for one in PostgresLedger(site.database).entries() if one.kind == "task"]
    assert entry.batch == first["batch"]
    budget = entry.held_micro_usd * (AT_ONCE + 1)
    suite = site.suite("second", RUNS, budget=str(budget / 1_000_000))
    assert budget < RUNS * entry.held_micro_usd

    worker = site.start("two", "worker")
    owner = site.start("one", "run", suite, "--json")
    try:
        killed: list[str] = []
        while owner.poll() is None:
            batches = [path.name for path in (site.directory / "one" / "batches").glob("second-*")]
            if batches:
                site.look(batches[0])
            if not killed and (killed := site.agents("two")):
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
    assert site.instances() == []
    entries = [one for one in PostgresLedger(site.database).entries() if one.batch == told["batch"]]
    assert {one.environment for one in entries} >= set(killed)
    assert all(one.actual_micro_usd is not None for one in entries)
    assert told["held_usd"] == 0
    # The limit and the budget were those of both together.
    assert 1 < site.most_running <= AT_ONCE
    assert site.most_counted <= budget


def test_what_does_not_fit_the_budget_waits_for_the_others_or_is_refused(site: Site) -> None:
    first = site.told("one", "run", site.suite("first", 1))
    [entry] = [
        one for one in PostgresLedger(site.database).entries() if one.batch == first["batch"] and one.kind == "task"
    ]
    tight = str(entry.held_micro_usd * 1.5 / 1_000_000)
    told = site.told("one", "run", site.suite("tight", 2, budget=tight))
    assert told["outcomes"] == {"scored": 2}
    one, two = sorted((row["started_at"], row["ended_at"]) for row in told["rows"])
    assert two[0] >= one[1][:19]  # the second waited until the first had settled
    process = site.start("one", "run", site.suite("none", 2, budget="0.000001"), "--json")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 8
    refused = json.loads(out)
    assert refused["outcomes"] == {"over_budget": 2}
    assert "more than" in refused["rows"][0]["message"]
    assert site.instances() == []
