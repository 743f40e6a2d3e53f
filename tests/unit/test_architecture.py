"""The architecture that docs/architecture.md shows is the one that the code has."""

from __future__ import annotations

import graphlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import grimp
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


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Whoever imported the wrong one of a circle first would fail, as the benchmarks once did."""
    graph = grimp.build_graph("provisioner", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError with the circle


@pytest.mark.parametrize("folder", [path for path in PACKAGE.rglob("__init__.py") if path in SOURCES])
def test_a_folder_says_in_a_few_lines_what_it_is_for(folder: Path) -> None:
    lines = folder.read_text().split('"""')[1].strip().splitlines()
    assert 1 <= len(lines) <= 4 or folder.parent == PACKAGE
