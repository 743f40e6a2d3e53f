"""Terraform and OpenTofu on the same stacks, where these have no provider; one mirror holds the provider of both.

Where `tofu` is not installed, Terraform under its name stands in: then only what provisioner does about it is tested.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from provisioner.base.errors import TerraformError
from provisioner.terraform.stack import Stack
from tests.terraform.conftest import Site, silent
from tests.terraform.test_modules import require, terraform
from tests.waiting import BOUND_SECONDS

pytestmark = pytest.mark.campaign

SCRIPT = Path(__file__).parents[2] / "scripts" / "provider-mirror"
FORGET = """terraform {
  required_providers {
    aws = {
      source = "hashicorp/aws"
    }
  }
}

variable "environments" {
  type = any
}

removed {
  from = aws_vpc.this

  lifecycle {
    destroy = false
  }
}
"""
PROVIDER = {
    "region": "eu-west-1", "access_key": "testing", "secret_key": "testing",
    "skip_credentials_validation": True, "skip_requesting_account_id": True,
}  # fmt: skip


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """The paths of both programs."""
    installed = shutil.which("terraform")
    if installed is None:
        pytest.skip("Terraform is not installed")
    link = tmp_path / "tofu"
    link.symlink_to(installed)
    return {"terraform": installed, "tofu": shutil.which("tofu") or str(link)}


def state(provider: str) -> dict[str, object]:
    """The state of a VPC that a newer version has made with a provider."""
    vpc = {
        "mode": "managed", "type": "aws_vpc", "name": "this", "provider": f'provider["{provider}"]',
        "instances": [{"schema_version": 1, "attributes": {"id": "vpc-1"}}],
    }  # fmt: skip
    return {"version": 4, "terraform_version": "1.99.0", "serial": 1, "lineage": "a", "resources": [vpc]}


def stack_with(directory: Path, written: dict[str, object], shared: bool) -> tuple[Stack, Path]:
    """A stack of two environments whose state is in the directory, or in a backend that others can write."""
    path = directory / ("shared.tfstate" if shared else "stack/terraform.tfstate")
    files = {
        "main.tf": FORGET,
        "provider.tf.json": json.dumps({"provider": {"aws": PROVIDER}}),
        "environments.auto.tfvars.json": json.dumps({"environments": {"one": {}, "two": {}}}),
    }
    if shared:
        files["backend.tf.json"] = json.dumps({"terraform": {"backend": {"local": {"path": str(path)}}}})
    stack = Stack(directory / "stack")
    stack.write(files)
    path.write_text(json.dumps(written))
    return stack, path


@pytest.mark.parametrize("first", ["terraform", "tofu"])
def test_without_a_provider_one_program_destroys_what_the_other_has_created(
    site: Site, programs: dict[str, str], monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    [second] = set(programs) - {first}
    monkeypatch.setenv("PROVISIONER_TERRAFORM", programs[first])
    site.write(site.spec("one"), site.spec("two"))
    site.stack.apply(silent)
    monkeypatch.setenv("PROVISIONER_TERRAFORM", programs[second])
    site.stack.remove({"one"}, silent)
    assert site.done("destroy") == ["one/primary"]
    site.stack.remove({"two"}, silent)
    assert site.done("destroy") == ["one/primary", "two/primary"]
    assert not site.directory.exists()


def test_terraform_leaves_a_shared_state_alone_that_opentofu_has_written(
    tmp_path: Path, programs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROVISIONER_TERRAFORM", programs["terraform"])
    stack, path = stack_with(tmp_path, state("registry.opentofu.org/hashicorp/aws"), shared=True)
    with pytest.raises(TerraformError) as failure:
        stack.remove({"one"}, silent)
    assert "If OpenTofu wrote it, set PROVISIONER_TERRAFORM=tofu" in (failure.value.hint or "")
    assert len(json.loads(path.read_text())["resources"]) == 1


@pytest.mark.parametrize("shared", [False, True], ids=["local-state", "shared-state"])
def test_an_unused_provider_is_refused_from_any_registry(
    tmp_path: Path, programs: dict[str, str], monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """A writer of the state might name another provider of the same namespace."""
    monkeypatch.setenv("PROVISIONER_TERRAFORM", programs["terraform"])
    stack, path = stack_with(tmp_path, state("registry.opentofu.org/hashicorp/other"), shared)
    with pytest.raises(TerraformError):
        stack.remove({"one"}, silent)
    assert len(json.loads(path.read_text())["resources"]) == 1
    assert not list((tmp_path / "stack" / ".terraform").rglob("other"))


@pytest.mark.parametrize("name", ["terraform", "tofu"])
def test_the_mirror_has_the_provider_for_both(tmp_path: Path, name: str) -> None:
    (tmp_path / "curl").write_text("#!/bin/sh\nexit 6\n")  # no registry answers
    (tmp_path / "curl").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "TF_CLI_CONFIG_FILE"}
    environment |= {
        "PATH": f"{tmp_path}:{environment['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PROVISIONER_TERRAFORM": f"/nowhere/{name}",
    }  # fmt: skip
    done = subprocess.run(
        [str(SCRIPT)], env=environment, capture_output=True, text=True, check=True, timeout=BOUND_SECONDS
    )
    if not done.stdout:
        pytest.skip("no mirror with the provider on this machine")
    environment["TF_CLI_CONFIG_FILE"] = done.stdout.strip()
    for host in ("registry.terraform.io", "registry.opentofu.org"):
        root = tmp_path / host
        root.mkdir()
        (root / "main.tf").write_text(FORGET.replace('"hashicorp/aws"', f'"{host}/hashicorp/aws"'))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TF_CLI_CONFIG_FILE", environment["TF_CLI_CONFIG_FILE"])
            require(terraform(root, "init", "-backend=false", "-input=false"))
        assert f'provider "{host}/hashicorp/aws"' in (root / ".terraform.lock.hcl").read_text()
