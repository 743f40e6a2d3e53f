"""Checks for the program that every cloud needs: Terraform. Each cloud's `problems()` checks for its own needs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

TERRAFORM_HINT = "scripts/install-terraform, or https://developer.hashicorp.com/terraform/install"


def problems() -> list[tuple[str, str]]:
    """Returns the missing programs as (problem, remedy) pairs."""
    if terraform_program(os.environ):
        return []
    if named := os.environ.get("PROVISIONER_TERRAFORM"):
        return [(f"PROVISIONER_TERRAFORM names {named}, which is not a program.", "Correct it, or unset it.")]
    return [("Terraform is not installed.", TERRAFORM_HINT)]


def terraform_program(ours: Mapping[str, str]) -> str | None:
    """Returns Terraform's path: PROVISIONER_TERRAFORM, or else `terraform` on PATH; None if neither exists.

    Args:
        ours: the controller's environment variables.
    """
    return shutil.which(ours.get("PROVISIONER_TERRAFORM") or "terraform", path=ours.get("PATH"))
