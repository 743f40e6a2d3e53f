"""The architecture that docs/architecture.md shows is the one that the code has."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "architecture.md").read_text()
PACKAGE = ROOT / "provisioner"
SOURCES = [path for path in PACKAGE.rglob("*.py") if "guest" not in path.relative_to(PACKAGE).parts]
MODULES = sorted(path for path in SOURCES if path.name != "__init__.py")
# Module -> the test that shows what it does, as the table under "Tests" says.
TESTED_ELSEWHERE = dict(re.findall(r"^\| `([\w/.]+)` \| `([\w/.]+)`", DOCUMENT, re.MULTILINE))


def test_the_drawing_in_the_document_is_todays() -> None:
    drawn = subprocess.run(
        [sys.executable, "scripts/architecture.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert f"```text\n{drawn.stdout}```" in DOCUMENT, "scripts/architecture.py --write brings it up to date"


@pytest.mark.parametrize("folder", [path for path in PACKAGE.rglob("__init__.py") if path in SOURCES])
def test_a_folder_says_in_a_few_lines_what_it_is_for(folder: Path) -> None:
    lines = folder.read_text().split('"""')[1].strip().splitlines()
    assert 1 <= len(lines) <= 4 or folder.parent == PACKAGE


def test_no_file_is_over_400_lines_and_the_median_is_under_120() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = [ROOT / name for name in listed if name.endswith((".py", ".tf", ".sh", ".j2", ".md"))]
    lengths = {path: len(path.read_text().splitlines()) for path in files}
    assert {str(path): length for path, length in lengths.items() if length > 400} == {}
    assert statistics.median(len(path.read_text().splitlines()) for path in MODULES) < 120


@pytest.mark.parametrize("module", [str(path.relative_to(PACKAGE)) for path in MODULES])
def test_a_module_has_unit_tests_of_its_name_or_the_document_says_what_tests_it(module: str) -> None:
    path = Path(module)
    own = ROOT / "tests" / "unit" / path.parent / f"test_{path.name}"
    if own.exists():
        assert module not in TESTED_ELSEWHERE
    else:
        assert (ROOT / TESTED_ELSEWHERE[module]).exists()
