"""What every cloud needs of the controller."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.terraform.requirements import problems


def test_terraform_is_missed_where_there_is_none_and_the_remedy_says_where_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PROVISIONER_TERRAFORM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    [(problem, remedy)] = problems()
    assert problem == "Terraform is not installed."
    assert "scripts/install-terraform" in remedy


def test_a_variable_that_names_no_program_is_to_blame_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "terraform"
    monkeypatch.setenv("PROVISIONER_TERRAFORM", str(program))
    [(problem, _)] = problems()
    assert problem == f"PROVISIONER_TERRAFORM names {program}, which is not a program."
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert problems() == []


@pytest.mark.parametrize(
    ("version", "least", "missing"),
    [("1.9.8", (1, 9), False), ("1.9.8", (1, 10), True), ("1.10.0-rc1", (1, 10), False), ("1.8.5", (1, 9), True)],
)
def test_a_terraform_that_is_too_old_for_the_cloud_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, least: tuple[int, int], missing: bool
) -> None:
    program = tmp_path / "terraform"
    program.write_text(f'#!/bin/sh\necho \'{{"terraform_version": "{version}"}}\'\n')
    program.chmod(0o755)
    monkeypatch.setenv("PROVISIONER_TERRAFORM", str(program))
    found = problems(least)
    assert bool(found) is missing
    if missing:
        assert found[0][0] == f"Terraform {version} is too old: {least[0]}.{least[1]} or newer is needed here."
