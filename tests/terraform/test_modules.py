"""Runs terraform fmt, validate and test on every module and on rendered roots."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from provisioner.base.config import data_directory
from provisioner.clouds.aws.stacks import AwsVariables
from provisioner.clouds.cloud import ModuleVariables
from provisioner.clouds.local.cloud import LocalVariables
from provisioner.terraform.process import product_that_runs, terraform_environment, terraform_program
from provisioner.terraform.render import EnvironmentSpec, render_stack
from tests.terraform.conftest import machine
from tests.waiting import BOUND_SECONDS

ROOT = data_directory("terraform")
VARIABLES: dict[str, ModuleVariables] = {
    "local": LocalVariables(directory="/nowhere/one"),
    "aws": AwsVariables(
        vpc_id="vpc-1", subnet_id="subnet-1", controller_cidrs=("192.0.2.1/32",),
        controller_rules={"192.0.2.1/32": 100},
        instance_types={"primary": "t3.micro", "aux": "t3.micro"}, user_data={}, spot=False, allowlist=None,
        expires_at="2026-01-31T23:59:59", scheduler_role_arn="arn:aws:iam::1:role/one", tags={},
    ),
}  # fmt: skip
MODULES = sorted({path.parent for path in ROOT.rglob("versions.tf") if ".terraform" not in path.parts})


def terraform(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Terraform as the stacks do, or OpenTofu where they would."""
    return subprocess.run(
        [terraform_program(os.environ) or "terraform", *arguments],
        cwd=directory, env=terraform_environment(os.environ), capture_output=True, text=True, check=False,
        timeout=BOUND_SECONDS,
    )  # fmt: skip


def require(done: subprocess.CompletedProcess[str]) -> None:
    """Fails with Terraform's output if it failed."""
    assert done.returncode == 0, done.stdout + done.stderr


def copy(module: Path, tmp_path: Path) -> Path:
    """Copies a module out of the checkout, since init writes into it."""
    return Path(shutil.copytree(module, tmp_path / "module", ignore=shutil.ignore_patterns(".terraform*")))


def rendered(variables: ModuleVariables, cloud: str, tmp_path: Path) -> Path:
    """A rendered root with one environment."""
    spec = EnvironmentSpec(
        environment_id="one",
        full_internet=False,
        machines={"primary": machine(), "aux": machine()},
        variables=variables,
    )
    for name, text in render_stack(cloud, type(variables), {"one": spec}).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_there_are_modules_to_look_at() -> None:
    assert ROOT / "local" / "environment" in MODULES


def test_the_modules_are_formatted() -> None:
    require(terraform(ROOT, "fmt", "-check", "-recursive", "-diff"))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_valid(module: Path, tmp_path: Path) -> None:
    copied = copy(module, tmp_path)
    require(terraform(copied, "init", "-backend=false", "-input=false"))
    require(terraform(copied, "validate"))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_passes_its_own_tests(module: Path, tmp_path: Path) -> None:
    assert list((module / "tests").glob("*.tftest.hcl")), "every module has tests"
    copied = copy(module, tmp_path)
    require(terraform(copied, "init", "-backend=false", "-input=false"))
    done = terraform(copied, "test", "-no-color")
    require(done)
    assert " 0 passed" not in done.stdout


@pytest.mark.parametrize(
    ("version", "taken"), [("5.99.1", False), ("5.100.0", True), ("6.4.0", False), ("6.5.0", True), ("7.0.0", False)]
)
@pytest.mark.parametrize("name", ["environment", "network"])
def test_the_modules_take_versions_5_and_6_of_the_provider(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str, taken: bool
) -> None:
    host = product_that_runs().registry
    package = tmp_path / "mirror" / host / "hashicorp" / "aws" / version / "linux_amd64"
    package.mkdir(parents=True)
    (package / f"terraform-provider-aws_v{version}").touch(mode=0o755)  # init does not start it
    configuration = tmp_path / "terraform.rc"
    configuration.write_text(f'provider_installation {{\n  filesystem_mirror {{ path = "{tmp_path}/mirror" }}\n}}\n')
    monkeypatch.setenv("TF_CLI_CONFIG_FILE", str(configuration))
    done = terraform(copy(ROOT / "aws" / name, tmp_path), "init", "-backend=false", "-input=false")
    assert (done.returncode == 0) is taken, done.stdout + done.stderr


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_variable_is_typed_described_and_never_null(module: Path) -> None:
    blocks = (module / "variables.tf").read_text().split('\nvariable "')
    for block in blocks:
        for word in ("type ", "description ", "nullable "):
            assert f"\n  {word}" in block, block.splitlines()[0]


@pytest.mark.parametrize("cloud", VARIABLES)
def test_a_rendered_root_is_formatted_and_valid(cloud: str, tmp_path: Path) -> None:
    root = rendered(VARIABLES[cloud], cloud, tmp_path)
    require(terraform(root, "fmt", "-check", "-recursive", "-diff"))
    require(terraform(root, "init", "-backend=false", "-input=false"))
    require(terraform(root, "validate"))
