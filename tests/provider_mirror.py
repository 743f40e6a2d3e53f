"""Lets Terraform or OpenTofu find the AWS provider if its registry cannot be reached."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from provisioner.store.files import write_atomically

SCRIPT = Path(__file__).parents[1] / "scripts" / "provider-mirror"


def use_provider_mirror() -> None:
    """Sets TF_CLI_CONFIG_FILE for this process and its children, or unsets one that names a missing file."""
    configuration = subprocess.run([str(SCRIPT)], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    if configuration:
        os.environ["TF_CLI_CONFIG_FILE"] = configuration
    else:
        os.environ.pop("TF_CLI_CONFIG_FILE", None)


def override_provider(directory: Path) -> None:
    """Spares commands the reading of the mirror's provider: `init` alone compares its 700 MB with the lock file.

    Args:
        directory: for the Terraform CLI configuration that says so.
    """
    text = Path(os.environ.get("TF_CLI_CONFIG_FILE", os.devnull)).read_text()
    mirror = "".join(re.findall(r'path = "(.*)"', text))
    directories = sorted(Path(mirror or os.devnull).glob("registry.*.*/hashicorp/aws/*/linux_amd64"))
    if not directories:
        return
    directory.mkdir(parents=True, exist_ok=True)
    written = directory / "terraform.rc"
    write_atomically(
        written,
        f"""provider_installation {{
  dev_overrides {{
    "hashicorp/aws" = "{directories[-1]}"
  }}
  filesystem_mirror {{ path = "{mirror}" }}
}}
""",
    )
    os.environ["TF_CLI_CONFIG_FILE"] = str(written)
