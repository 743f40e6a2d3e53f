"""Plans the network's module on a state of an earlier version, which also made the schedules' group and a role."""

from __future__ import annotations

import json
from pathlib import Path

from provisioner.terraform.render import render_network
from provisioner.terraform.requirements import OPENTOFU, TERRAFORM, product_that_runs
from tests.terraform.test_modules import require, terraform

MADE = {
    "aws_scheduler_schedule_group": ("this", {"id": "provisioner", "name": "provisioner"}),
    "aws_iam_role": ("scheduler", {"id": "provisioner-scheduler-eu-west-1", "name": "provisioner-scheduler-eu-west-1"}),
    "aws_iam_role_policy": ("terminate", {"id": "provisioner-scheduler-eu-west-1:terminate", "policy": "{}"}),
}
FORGOTTEN = {TERRAFORM: "will no longer be managed by Terraform", OPENTOFU: "will be removed from the OpenTofu state"}
PROVIDER = """provider "aws" {
  region                      = "eu-west-1"
  access_key                  = "testing"
  secret_key                  = "testing"
  skip_credentials_validation = true
  skip_requesting_account_id  = true
}
"""


def state() -> str:
    """The state of a network whose other resources are gone."""
    resources = [
        {
            "module": "module.network", "mode": "managed", "type": kind, "name": name,
            "provider": f'provider["{product_that_runs().registry}/hashicorp/aws"]',
            "instances": [{"schema_version": 0, "attributes": attributes}],
        }
        for kind, (name, attributes) in MADE.items()
    ]  # fmt: skip
    return json.dumps(
        {"version": 4, "terraform_version": "1.11.4", "serial": 1, "lineage": "a", "resources": resources}
    )


def test_the_group_of_all_schedules_is_left_alone(tmp_path: Path) -> None:
    values = {
        "region": "eu-west-1", "availability_zones": ["eu-west-1a", "eu-west-1b"],
        "controllers": {"203.0.113.10/32": 100}, "tags": {},
    }  # fmt: skip
    for name, text in {**render_network("aws", values), "provider.tf": PROVIDER, "terraform.tfstate": state()}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    require(terraform(tmp_path, "init", "-input=false"))
    planned = terraform(tmp_path, "plan", "-refresh=false", "-input=false", "-no-color")
    require(planned)
    assert "0 to change, 0 to destroy" in planned.stdout
    for kind, (name, _) in MADE.items():
        assert f"# module.network.{kind}.{name} {FORGOTTEN[product_that_runs()]}" in planned.stdout
