"""Stacks of OpenTofu, which Terraform leaves alone, with small programs in their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.errors import HostError, TerraformError
from provisioner.terraform.stack import Stack
from tests.unit.terraform.conftest import Program, error_line, runs, say, silent


def opentofu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """Makes a shell script OpenTofu, as far as its name goes. It lists its runs in `tofu-runs`."""
    path = tmp_path / "tofu"
    path.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/tofu-runs\n[ "$1" = init ] && exit 0\n{script}\n')
    path.chmod(0o755)
    monkeypatch.setenv("PROVISIONER_TERRAFORM", str(path))
    return tmp_path / "tofu-runs"


def test_messages_name_opentofu_if_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provisioner.terraform.stack.RETRY_SECONDS", (0.0,))
    error = error_line("Failed", "connection reset by peer")
    opentofu(tmp_path, monkeypatch, f"echo '{error}'; exit 1")
    stack = Stack(tmp_path / "stack")
    stack.write({"main.tf": ""})
    told: list[str] = []
    with pytest.raises(TerraformError, match="tofu apply failed: Failed"):
        stack.apply(told.append)
    assert told[0].startswith("tofu apply failed: the network dropped a connection")
    opentofu(tmp_path, monkeypatch, f"echo '{error_line('Error acquiring the state lock')}'; exit 1")
    with pytest.raises(TerraformError) as failure:
        stack.remove((), silent)
    assert failure.value.message.startswith("tofu destroy did nothing")
    assert "`tofu force-unlock`" in (failure.value.hint or "")


def test_each_of_the_two_programs_initialises_a_root_for_itself(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = program("exit 0"), Stack(tmp_path / "second")
    second.write({"main.tf": ""})
    first.apply(silent)
    assert not (tmp_path / "tofu-runs").exists()
    ran = opentofu(tmp_path, monkeypatch, "exit 0")
    first.apply(silent)
    first.apply(silent)
    second.apply(silent)  # which copies what OpenTofu has installed for the first
    assert [line.split()[0] for line in ran.read_text().splitlines()] == ["init", "apply", "apply", "apply"]


PROVIDER = 'provider "registry.{}/hashicorp/aws" {{\n  version     = "5.100.0"\n}}\n'


def test_a_stack_stays_with_the_program_that_installed_its_provider(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = program("exit 0")
    (tmp_path / "stack" / ".terraform.lock.hcl").write_text(PROVIDER.format("opentofu.org"))
    with pytest.raises(HostError, match="OpenTofu made the stack stack, and Terraform would run now") as failure:
        stack.remove((), silent)
    assert "PROVISIONER_TERRAFORM=tofu" in (failure.value.hint or "")
    assert stack.exists
    assert not (tmp_path / "runs").exists()
    ran = opentofu(tmp_path, monkeypatch, "exit 0")
    stack.apply(silent)
    (tmp_path / "stack" / ".terraform.lock.hcl").write_text(PROVIDER.format("terraform.io"))
    with pytest.raises(HostError, match="Terraform made the stack stack, and OpenTofu would run now"):
        stack.apply(silent)
    assert [line.split()[0] for line in ran.read_text().splitlines()] == ["init", "apply"]


def test_a_shared_state_of_opentofu_is_refused_with_the_way_out(program: Program, tmp_path: Path) -> None:
    error = error_line("Failed to load plugin schemas", 'unavailable provider "registry.opentofu.org/hashicorp/aws"')
    stack = program(f"{say(tmp_path, error)}; exit 1")
    with pytest.raises(TerraformError, match="a provider that this stack does not use") as failure:
        stack.apply(silent)
    assert "If OpenTofu wrote it, set PROVISIONER_TERRAFORM=tofu" in (failure.value.hint or "")
    assert len(runs(tmp_path)) == 1
