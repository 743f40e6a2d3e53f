"""Finds the program that every cloud needs, Terraform or OpenTofu, and checks its version.

Each cloud's `problems()` checks for its own needs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from provisioner import child_environment

VERSION_SECONDS = 30.0
LEAST = (1, 9)
# 1.10 knows `use_lockfile` and the lock file of Terraform; in 1.10.6, a variable whose validation refers to another one
# no longer disturbs `destroy` (OpenTofu's changelogs of 1.10 and 1.11, #3131).
LEAST_OPENTOFU = (1, 10, 6)
TERRAFORM_HINT = "scripts/install-terraform, or https://developer.hashicorp.com/terraform/install"


class Product(NamedTuple):
    """One of the two programs that can run a stack.

    Args:
        name: what it is called.
        command: how it is started.
        registry: the host of the providers that a configuration names without one.
        hint: where to get it.
    """

    name: str
    command: str
    registry: str
    hint: str


TERRAFORM = Product("Terraform", "terraform", "registry.terraform.io", TERRAFORM_HINT)
OPENTOFU = Product("OpenTofu", "tofu", "registry.opentofu.org", "https://opentofu.org/docs/intro/install/")


def problems(least: tuple[int, int] = LEAST) -> list[tuple[str, str]]:
    """Returns the missing programs as (problem, remedy) pairs.

    Args:
        least: the oldest version of Terraform with which the cloud works.
    """
    if program := terraform_program(os.environ):
        product, version = _version(program)
        needed = LEAST_OPENTOFU if product is OPENTOFU else least
        if version and _numbers(version)[: len(needed)] < needed:
            oldest = ".".join(map(str, needed))
            return [(f"{product.name} {version} is too old: {oldest} or newer is needed here.", product.hint)]
        return []
    if named := os.environ.get("PROVISIONER_TERRAFORM"):
        return [(f"PROVISIONER_TERRAFORM names {named}, which is not a program.", "Correct it, or unset it.")]
    return [("Neither Terraform nor OpenTofu is installed.", TERRAFORM_HINT)]


def notes() -> list[str]:
    """Returns what the operator should know: that OpenTofu runs, if it does."""
    program = terraform_program(os.environ)
    if program is None or product_of(program) is not OPENTOFU:
        return []
    return [f"OpenTofu {_version(program)[1]}".rstrip() + f" runs in place of Terraform: {program}"]


def terraform_program(ours: Mapping[str, str]) -> str | None:
    """Returns the program's path: PROVISIONER_TERRAFORM, or else `terraform`, or else `tofu` on PATH; None without one.

    Args:
        ours: the controller's environment variables.
    """
    named = ours.get("PROVISIONER_TERRAFORM")
    names = [named] if named else [TERRAFORM.command, OPENTOFU.command]
    found = (shutil.which(name, path=ours.get("PATH")) for name in names)
    return next(filter(None, found), None)


def product_of(program: str) -> Product:
    """Returns what a program is, judged by its name and, if it is a link, by that of its target. Starts nothing."""
    path = Path(program)
    return OPENTOFU if any("tofu" in name for name in (path.name, path.resolve().name)) else TERRAFORM


def product_that_runs() -> Product:
    """Returns what the next run starts. Starts nothing."""
    return product_of(terraform_program(os.environ) or TERRAFORM.command)


def _version(program: str) -> tuple[Product, str]:
    """Asks a program what it is and for its version, which is empty if it does not say."""
    try:
        said = subprocess.run(
            [program, "version"],
            env=child_environment.for_terraform(os.environ, {}) | {"CHECKPOINT_DISABLE": "1"},
            capture_output=True,
            timeout=VERSION_SECONDS,
            check=True,
        ).stdout.decode(errors="replace")
    except (OSError, subprocess.SubprocessError):
        said = ""
    match = re.match(r"(Terraform|OpenTofu) v(\d[\w.+-]*)", said)
    if match is None:
        return product_of(program), ""
    return OPENTOFU if match[1] == OPENTOFU.name else TERRAFORM, match[2]


def _numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
