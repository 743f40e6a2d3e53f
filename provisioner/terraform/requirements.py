"""Checks for the program that every cloud needs: Terraform. Each cloud's `problems()` checks for its own needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping

from provisioner import child_environment, strict_json

LEAST = (1, 9)
VERSION_SECONDS = 30.0
TERRAFORM_HINT = "scripts/install-terraform, or https://developer.hashicorp.com/terraform/install"


def problems(least: tuple[int, int] = LEAST) -> list[tuple[str, str]]:
    """Returns the missing programs as (problem, remedy) pairs.

    Args:
        least: the oldest version of Terraform with which the cloud works.
    """
    if program := terraform_program(os.environ):
        version = _version(program)
        if version and _numbers(version) < least:
            needed = f"{least[0]}.{least[1]} or newer is needed here."
            return [(f"Terraform {version} is too old: {needed}", TERRAFORM_HINT)]
        return []
    if named := os.environ.get("PROVISIONER_TERRAFORM"):
        return [(f"PROVISIONER_TERRAFORM names {named}, which is not a program.", "Correct it, or unset it.")]
    return [("Terraform is not installed.", TERRAFORM_HINT)]


def _version(program: str) -> str:
    """Asks Terraform for its version; empty if it does not say."""
    try:
        said = subprocess.run(
            [program, "version", "-json"],
            env=child_environment.for_terraform(os.environ, ()),
            capture_output=True,
            timeout=VERSION_SECONDS,
            check=True,
        )
        return str(strict_json.parse(said.stdout)["terraform_version"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def terraform_program(ours: Mapping[str, str]) -> str | None:
    """Returns Terraform's path: PROVISIONER_TERRAFORM, or else `terraform` on PATH; None if neither exists.

    Args:
        ours: the controller's environment variables.
    """
    return shutil.which(ours.get("PROVISIONER_TERRAFORM") or "terraform", path=ours.get("PATH"))
