"""What every cloud needs of the controller: Terraform. What one cloud needs besides, its `problems()` say."""

from __future__ import annotations

import os

from provisioner.terraform.process import terraform_program

TERRAFORM_HINT = "scripts/install-terraform, or https://developer.hashicorp.com/terraform/install"


def problems() -> list[tuple[str, str]]:
    """What is missing, as (problem, how to mend it)."""
    if terraform_program(os.environ):
        return []
    return [("Terraform is not installed.", TERRAFORM_HINT)]
