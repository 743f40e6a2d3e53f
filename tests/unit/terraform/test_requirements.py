"""What every cloud needs of the controller: Terraform, or OpenTofu in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.terraform.process import (
    OPENTOFU,
    TERRAFORM,
    notes,
    problems,
    product_of,
    product_that_runs,
    terraform_program,
)


def program(path: Path, said: str = "") -> Path:
    """Writes a program that says its version as Terraform and OpenTofu do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n[ \"$1\" = version ] && echo '{said}'\necho 'on linux_amd64'\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROVISIONER_TERRAFORM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_missing_terraform_and_opentofu_says_where_to_get_one() -> None:
    [(problem, remedy)] = problems()
    assert problem == "Neither Terraform nor OpenTofu is installed."
    assert "scripts/install-terraform" in remedy
    assert notes() == []
    assert product_that_runs() is TERRAFORM


def test_a_variable_that_names_no_program_is_to_blame_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tmp_path / "elsewhere" / "terraform"
    monkeypatch.setenv("PROVISIONER_TERRAFORM", str(named))
    [(problem, _)] = problems()
    assert problem == f"PROVISIONER_TERRAFORM names {named}, which is not a program."
    program(named)
    assert problems() == []


def test_the_named_program_comes_before_terraform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = {"PATH": str(tmp_path)}
    assert terraform_program(path) is None
    tofu = program(tmp_path / "tofu", "OpenTofu v1.11.1")
    assert terraform_program(path) == str(tofu)
    assert product_that_runs() is OPENTOFU
    assert notes() == [f"OpenTofu 1.11.1 runs in place of Terraform: {tofu}"]
    terraform = program(tmp_path / "terraform", "Terraform v1.11.4")
    assert terraform_program(path) == str(terraform)
    assert (product_that_runs(), notes()) == (TERRAFORM, [])
    assert terraform_program({**path, "PROVISIONER_TERRAFORM": "tofu"}) == str(tofu)
    other = program(tmp_path / "other")
    assert terraform_program({**path, "PROVISIONER_TERRAFORM": str(other)}) == str(other)
    assert terraform_program({**path, "PROVISIONER_TERRAFORM": "/nowhere"}) is None


def test_opentofu_is_known_by_its_name_also_behind_a_link(tmp_path: Path) -> None:
    for name in ("tofu", "opentofu-1.10", "terraform", "shim"):
        program(tmp_path / name)
    (tmp_path / "bin").mkdir()
    linked, manager = tmp_path / "bin" / "terraform", tmp_path / "bin" / "tofu"
    linked.symlink_to(tmp_path / "tofu")
    manager.symlink_to(tmp_path / "shim")  # a version manager's: one program under both names
    assert {product_of(str(tmp_path / name)) for name in ("tofu", "opentofu-1.10")} == {OPENTOFU}
    assert {product_of(str(path)) for path in (linked, manager)} == {OPENTOFU}
    assert product_of(str(tmp_path / "terraform")) is TERRAFORM


@pytest.mark.parametrize(
    ("said", "least", "missing"),
    [
        ("Terraform v1.9.8", (1, 9), ""),
        ("Terraform v1.10.0-rc1", (1, 10), ""),
        ("Terraform v1.9.8", (1, 10), "Terraform 1.9.8 is too old: 1.10 or newer is needed here."),
        ("Terraform v1.8.5", (1, 9), "Terraform 1.8.5 is too old: 1.9 or newer is needed here."),
        ("OpenTofu v1.10.6", (1, 10), ""),
        ("OpenTofu v1.12.0", (1, 9), ""),
        ("OpenTofu v1.10.5", (1, 9), "OpenTofu 1.10.5 is too old: 1.10.6 or newer is needed here."),
        ("OpenTofu v1.9.4", (1, 10), "OpenTofu 1.9.4 is too old: 1.10.6 or newer is needed here."),
        ("no version", (1, 9), ""),
    ],
)
def test_a_program_that_is_too_old_for_the_cloud_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, least: tuple[int, int], missing: str
) -> None:
    monkeypatch.setenv("PROVISIONER_TERRAFORM", str(program(tmp_path / "any", said)))
    found = problems(least)
    assert [problem for problem, _ in found] == ([missing] if missing else [])
    if missing:
        assert ("opentofu" in found[0][1]) is said.startswith("OpenTofu")
