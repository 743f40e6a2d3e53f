"""Tests what `costs` says of what it does not count. What it sums, tests/unit/costs tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.base.clock import now
from provisioner.costs.ledger import Ledger
from provisioner.store.home import Home
from tests.unit.batch.samples import entry
from tests.unit.conftest import CommandLine


def launched(provisioner: CommandLine, cloud: str) -> None:
    """Writes an ended launch into the ledger."""
    home = Home(provisioner.home)
    home.make()
    reserved = entry(f"env-{cloud}", now(), cloud=cloud, reserved_micro_usd=9, ended_at=now(), actual_micro_usd=5)
    Ledger(home.ledger).reserve(reserved)


def test_costs_name_what_aws_bills_besides(provisioner: CommandLine) -> None:
    launched(provisioner, "aws")
    launched(provisioner, "local")
    said = provisioner("costs").stdout
    assert "Not included on aws: what is sent beyond egress_gb until CloudWatch shows it" in said
    assert "the storage of images (0.05 USD a GB and month)" in said
    assert "schedules (the account's first 14 million a month cost nothing)" in said
    assert list(provisioner("costs", "--json").json["not_included"]) == ["aws"]


@pytest.mark.parametrize("arguments", [("costs",), ("costs", "--cloud", "local")], ids=["all", "local"])
def test_what_costs_nothing_leaves_nothing_out(provisioner: CommandLine, arguments: tuple[str, ...]) -> None:
    launched(provisioner, "local")
    assert "Not included" not in provisioner(*arguments).stdout
    assert provisioner(*arguments, "--json").json["not_included"] == {}


def test_a_table_for_programs_has_only_rows(provisioner: CommandLine) -> None:
    launched(provisioner, "aws")
    assert "Not included" not in provisioner("costs", "--csv").stdout


NEEDS_A_KEY = """
class TaskFamily:
    standard_version = "0.5.0"
    required_environment_variables = ["KEY"]

    @staticmethod
    def get_tasks(): return {"main": {}}

    @staticmethod
    def get_instructions(t): return "Do it."
"""


def test_what_surely_fails_has_no_plan(provisioner: CommandLine, tmp_path: Path) -> None:
    family = tmp_path / "fam"
    family.mkdir()
    (family / "fam.py").write_text(NEEDS_A_KEY)
    (tmp_path / "other.env").write_text("OTHER=1\n")
    planned = provisioner("plan", str(family), "missing")
    assert (planned.code, "no task 'missing'" in planned.stderr) == (2, True), planned.stderr
    planned = provisioner("plan", str(family), "main", "--env-file", str(tmp_path / "other.env"))
    assert (planned.code, "KEY" in planned.stderr) == (2, True), planned.stderr
    planned = provisioner("plan", str(family), "main")  # without an env file its secrets do not matter yet
    assert planned.code == 0, planned.stderr
    assert "variables: KEY not set; set them in the file of --env-file" in planned.stdout
    suite = tmp_path / "suite.yaml"
    suite.write_text("name: s\nfamilies: [{path: fam}]\nagents: [{name: a, directory: ., command: ls}]\n")
    assert "fam needs KEY: `env_file` has to set them." in provisioner("batch", "plan", str(suite)).stdout


def test_a_plan_says_whether_there_is_an_aux_vm_as_far_as_that_is_known(
    provisioner: CommandLine, tmp_path: Path
) -> None:
    family = tmp_path / "fam"
    family.mkdir()
    (family / "fam.py").write_text(NEEDS_A_KEY)
    assert (
        "aux VM: none in the module; certain once the image is built\n"
        in provisioner("plan", str(family), "main").stdout
    )
    (family / "fam.py").write_text(NEEDS_A_KEY + "    def get_aux_vm_spec(t): return None\n")
    assert "aux VM: not known until the family's image is built" in provisioner("plan", str(family), "main").stdout
