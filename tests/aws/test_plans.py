"""What `plan` says before anything is created: the room for an allowlist, and what costs money besides."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from provisioner.store.home import Home
from tests.aws.account import Account
from tests.command_line import ROOT, provisioner

FAMILY = str(ROOT / "tests" / "contract" / "families" / "echo")


@pytest.fixture
def home(account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """Returns the home of a controller with an address."""
    monkeypatch.setenv("PROVISIONER_CONTROLLER_CIDRS", "203.0.113.10/32")
    return Home(tmp_path / "home")


def plan(home: Home, *arguments: str, addresses: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs the command for an environment that may reach so many addresses."""
    allow = [text for number in range(1, addresses + 1) for text in ("--allow", f"198.51.100.{number}:443")]
    return provisioner(home, "plan", FAMILY, "main", "--cloud", "aws", "--region", "us-east-1", *allow, *arguments)


def test_a_plan_says_how_many_addresses_an_acl_has_room_for(home: Home) -> None:
    done = plan(home, addresses=2)
    assert done.returncode == 0, done.stderr
    said = re.search(
        r"\n  allowlist: 2 of the (\d+) addresses that a network ACL in us-east-1 has room for\n", done.stdout
    )
    assert said
    # The last rule denies the rest, and controllers have theirs: this one, and those of other tests.
    assert 1 < int(said[1]) <= 18


def test_a_plan_refuses_an_allowlist_that_no_acl_holds(home: Home) -> None:
    done = plan(home, addresses=19)
    assert done.returncode == 2
    assert "An allowlist of 19 addresses does not fit a network ACL in us-east-1" in done.stderr
    assert "the account's quota is 20" in done.stderr
    assert "Service Quotas" in done.stderr


def test_a_plan_names_what_its_costs_do_not_include(home: Home) -> None:
    done = plan(home)
    assert "allowlist" not in done.stdout
    [line] = [line for line in done.stdout.splitlines() if line.startswith("Not included: ")]
    for part in ("what is sent beyond egress_gb", "the storage of images", "schedules"):
        assert part in line
    answer = json.loads(plan(home, "--json").stdout)
    assert (answer["allowlist"], f"Not included: {answer['not_included']}.") == ("", line)
