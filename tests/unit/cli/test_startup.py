"""What short commands must not import: they would take a second to start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import ROOT

SLOW = {"paramiko", "boto3", "botocore", "cryptography", "dbos", "sqlalchemy"}
LIBRARIES_OF_EXTRAS = {"boto3", "botocore", "dbos", "psycopg", "sqlalchemy"}
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


def test_the_help_and_the_list_import_less_than_other_commands(tmp_path: Path) -> None:
    assert imported_by(tmp_path / "home", "--help") & {"pydantic", "provisioner.base.models"} == set()
    assert imported_by(tmp_path / "home", "list") & {"sqlite3", "provisioner.session"} == set()


def test_the_batch_commands_are_imported_for_their_help(tmp_path: Path) -> None:
    assert imported_by(tmp_path / "home", "batch", "--help") > {"dbos", "sqlalchemy"}


WITHOUT_EXTRAS = f"""
import sys
sys.modules.update(dict.fromkeys({sorted(LIBRARIES_OF_EXTRAS)!r}))  # an import of these fails, as if not installed
from provisioner.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["aws", "policy"], "aws"),
        (["plan", str(FAMILY), "easy", "--cloud", "aws"], "aws"),
        (["batch", "show", "nothing"], "batch"),
    ],
    ids=["aws", "cloud", "batch"],
)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_a_command_names_the_extra_that_it_lacks(
    tmp_path: Path, arguments: list[str], extra: str, as_json: bool
) -> None:
    done = without_extras(tmp_path, *arguments, *["--json"] * as_json)
    assert done.returncode == 3, done.stderr
    assert f"pip install 'provisioner[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments", [["list"], ["plan", str(FAMILY), "easy"], ["costs"]], ids=["list", "plan", "costs"]
)
def test_the_local_cloud_needs_no_extra(tmp_path: Path, arguments: list[str]) -> None:
    done = without_extras(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr


def without_extras(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command where the libraries of extras are not installed."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, *arguments],
        cwd=ROOT, env={**os.environ, "PROVISIONER_HOME": str(home)}, capture_output=True, text=True,
    )  # fmt: skip
