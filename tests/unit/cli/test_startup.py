"""What short commands must not import: they would take a second to start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import ROOT

SLOW = {"paramiko", "boto3", "botocore", "cryptography", "dbos", "sqlalchemy"}
FAMILY = ROOT / "examples" / "number_guess"
PROGRAM = """
import sys
from provisioner.cli.app import main
main()
print(*sys.modules, file=sys.stderr)
"""


def imported_by(home: Path, *arguments: str) -> set[str]:
    """The names of the modules that a command has imported in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=ROOT, env={**os.environ, "PROVISIONER_HOME": str(home)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("command", ["list", "--help", "show nothing", "doctor", f"check {FAMILY}"])
def test_a_short_command_imports_no_engine_and_no_batches(tmp_path: Path, command: str) -> None:
    imported = imported_by(tmp_path / "home", *command.split())
    assert "provisioner.cli" in imported
    assert imported & SLOW == set()
    assert [name for name in imported if name.startswith("provisioner.batch")] == []


def test_the_batch_commands_are_imported_for_their_help(tmp_path: Path) -> None:
    assert imported_by(tmp_path / "home", "batch", "--help") > {"dbos", "sqlalchemy"}
