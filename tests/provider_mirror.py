"""Lets Terraform find the AWS provider where its registry cannot be reached."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "provider-mirror"


def use_provider_mirror() -> None:
    """Sets TF_CLI_CONFIG_FILE for this process and its children, or takes away one that names no file."""
    found = subprocess.run([str(SCRIPT)], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    if found:
        os.environ["TF_CLI_CONFIG_FILE"] = found
    else:
        os.environ.pop("TF_CLI_CONFIG_FILE", None)
