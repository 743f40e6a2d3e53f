"""The architecture that docs/architecture.md shows is the one that the code has."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "architecture.md").read_text()
PACKAGE = ROOT / "provisioner"
SOURCES = [path for path in PACKAGE.rglob("*.py") if "guest" not in path.relative_to(PACKAGE).parts]


def test_the_drawing_in_the_document_is_todays() -> None:
    drawn = subprocess.run(
        [sys.executable, "scripts/architecture.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert f"```text\n{drawn.stdout}```" in DOCUMENT, "scripts/architecture.py --write brings it up to date"


def test_the_run_in_the_document_is_todays() -> None:
    [section] = re.findall(r"^## One run, call by call\n(.*?)^## ", DOCUMENT, re.MULTILINE | re.DOTALL)
    hops = re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE)
    assert 20 <= len(hops) <= 25
    for hop in hops:
        assert callable(pkgutil.resolve_name(f"provisioner.{hop}")), hop


def test_no_process_with_threads_runs_python_between_fork_and_exec() -> None:
    """Another thread's locks may be locked there for ever. Terraform starts machine.py by itself, without threads."""
    users = [str(path.relative_to(PACKAGE)) for path in SOURCES if "preexec_fn=" in path.read_text()]
    assert users == ["clouds/local/machine.py"]


@pytest.mark.parametrize("folder", [path for path in PACKAGE.rglob("__init__.py") if path in SOURCES])
def test_a_folder_says_in_a_few_lines_what_it_is_for(folder: Path) -> None:
    lines = folder.read_text().split('"""')[1].strip().splitlines()
    assert 1 <= len(lines) <= 4 or folder.parent == PACKAGE
