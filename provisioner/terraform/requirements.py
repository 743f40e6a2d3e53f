"""Checks for the program that every cloud needs: Terraform. Each cloud's `problems()` checks for its own needs."""

from __future__ import annotations

import os

from provisioner.terraform.process import terraform_program

TERRAFORM_HINT = "scripts/install-terraform, or https://developer.hashicorp.com/terraform/install"


def problems() -> list[tuple[str, str]]:
    """Returns the missing programs as (problem, remedy) pairs."""
    if terraform_program(os.environ):
        return []
    return [("Terraform is not installed.", TERRAFORM_HINT)]
