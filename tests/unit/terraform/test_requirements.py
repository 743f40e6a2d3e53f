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
