"""What every cloud needs of the controller. What one cloud needs beside, its own `problems` say."""

from __future__ import annotations

import shutil

TERRAFORM_HINT = "scripts/install-terraform, or https://developer.hashicorp.com/terraform/install"


def problems() -> list[tuple[str, str]]:
    """What is missing, as (problem, how to mend it)."""
    if shutil.which("terraform"):
        return []
    return [("Terraform is not installed.", TERRAFORM_HINT)]
