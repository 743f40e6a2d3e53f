"""What every cloud needs of the controller."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.terraform.requirements import problems


def test_terraform_is_missed_where_there_is_none_and_the_hint_says_where_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "terraform"
    monkeypatch.setenv("PROVISIONER_TERRAFORM", str(program))
    [(problem, hint)] = problems()
    assert problem == "Terraform is not installed."
    assert "scripts/install-terraform" in hint
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert problems() == []
