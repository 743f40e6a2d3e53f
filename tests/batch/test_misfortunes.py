"""What EC2 does to a batch now and then: it takes spot instances back, and gives no more where it gave some."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from provisioner.store.home import Home
from tests.aws.loopback import AccountOfMany
from tests.batch import many
from tests.command_line import CLI

pytestmark = [pytest.mark.xdist_group("workers"), pytest.mark.timeout(1800)]
REGIONS = ("us-east-1", "us-west-2")


def wait_for_an_agent(home: Path, process: subprocess.Popen[str]) -> str:
    """The environment in which it works."""
    deadline = time.monotonic() + 300
    while not (found := many.working(home)):
        assert process.poll() is None, "the controller ended"
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found[0]


def test_a_run_survives_a_spot_interruption_and_a_missing_quota(
    account: AccountOfMany, prepared: Home, tmp_path: Path
) -> None:
    home = many.knowing(prepared, tmp_path / "home").root
    variables = many.variables(account.url, home, tmp_path)
    suite = many.write_suite(tmp_path, "one", "sleep 20", regions=REGIONS, spot=True)
    with (
        (tmp_path / "log").open("w+") as log,
        subprocess.Popen(
            [*CLI, "batch", "run", suite, "--json"], env=variables, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=log, text=True,
        ) as process,
    ):  # fmt: skip
        try:
            interrupted = wait_for_an_agent(home, process)
            account.happen("no-quota", REGIONS[0])
            account.happen("interrupt", interrupted)
            out, _ = process.communicate(timeout=600)
        finally:
            account.happen("quota", REGIONS[0])
            process.kill()
        log.seek(0)
        assert process.returncode == 0, log.read()[-3000:]
    [row] = json.loads(out)["rows"]
    assert (row["outcome"], row["score"], row["attempts"], row["region"]) == ("scored", 1.0, 3, REGIONS[1])
    # EC2 was asked before the loss was believed, and its word is passed on.
    lost, full = row["retried"]
    assert "Server.SpotInstanceTermination" in lost
    assert "quota of vCPUs is used up" in full
    assert row["phases"][0]["name"] == "earlier attempts"
    # All attempts are paid for, and nothing is left of any.
    told = subprocess.run([*CLI, "costs", "--json"], env=variables, capture_output=True, text=True, check=True)
    assert json.loads(told.stdout)["reserved_usd"] == 0
    assert interrupted in told.stdout
    assert [many.instances(account.url, region) for region in REGIONS] == [[], []]
