"""A stack under OpenTofu, and one that Terraform takes over from it, with small programs in their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.errors import TerraformError
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


@pytest.mark.parametrize(
    ("error", "taken_over"),
    [
        ('unavailable provider "registry.opentofu.org/hashicorp/aws"', True),
        ("Could not retrieve versions for provider registry.opentofu.org/hashicorp/aws: no such host", True),
        ('unavailable provider "registry.opentofu.org/attacker/evil"', False),
        ('unavailable provider "registry.opentofu.org/hashicorp/../attacker"', False),
        ('unavailable provider "registry.opentofu.org/hashicorp/aws/evil"', False),
    ],
    ids=["unavailable", "unreachable", "other-namespace", "dots", "longer"],
)
def test_terraform_takes_over_a_provider_of_opentofu_once(
    program: Program, tmp_path: Path, error: str, taken_over: bool
) -> None:
    say_error = say(tmp_path, error_line("Failed to load plugin schemas", error))
    stack = program(f'[ "$1" = state ] || {{ {say_error}; exit 1; }}')
    told: list[str] = []
    with pytest.raises(TerraformError):
        stack.apply(told.append)
    replaced = [line for line in runs(tmp_path) if line.startswith("state")]
    names = "registry.opentofu.org/hashicorp/aws registry.terraform.io/hashicorp/aws"
    assert replaced == ([f"state replace-provider -auto-approve {names}"] if taken_over else [])
    assert len(told) == len(replaced)
    assert len(runs(tmp_path)) == (3 if taken_over else 1)


def test_opentofu_is_not_told_to_replace_providers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = error_line("Failed", 'unavailable provider "registry.opentofu.org/hashicorp/aws"')
    ran = opentofu(tmp_path, monkeypatch, f"echo '{error}'; exit 1")
    stack = Stack(tmp_path / "stack")
    stack.write({"main.tf": ""})
    with pytest.raises(TerraformError):
        stack.apply(silent)
    assert "state" not in ran.read_text()
