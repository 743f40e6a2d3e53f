"""Imports that no machine can satisfy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from provisioner.family.checks.source import read_source
from provisioner.family.loader import load_family
from tests.unit.family.checks.families import GOOD, checked, found


def build_step(command: str) -> dict[str, str]:
    return {"build_steps.json": json.dumps([{"type": "shell", "commands": [command]}])}


@pytest.mark.parametrize(
    "line",
    ["import json, os.path", "import metr_task_standard", "import pytest", "import own", "import imp", "import deep",
     "from . import own", "from own.x import y", "from assets.deep import x", "import copied",
     "try:\n    import numpy\nexcept ImportError:\n    pass", "def f():\n    import numpy", "if 0:\n    import numpy"],
)  # fmt: skip
def test_nothing_is_said_of_imports_that_the_machine_can_satisfy(tmp_path: Path, line: str) -> None:
    copied = [{"type": "file", "source": "assets/deep.py", "destination": "lib/copied.py"}]
    files = {"own.py": "", "assets/deep.py": "", "build_steps.json": json.dumps(copied)}
    assert found(checked(tmp_path, f"{line}\n{GOOD}", files)) == []


@pytest.mark.parametrize("line", ["import numpy", "import numpy.linalg as la", "from numpy import array"])
def test_an_import_that_only_install_could_satisfy_is_found(tmp_path: Path, line: str) -> None:
    result = checked(tmp_path, f"import os\n{line}\n{GOOD}")
    assert found(result) == ["warning import-before-install fam.py:2"]
    assert "'numpy'" in result.findings[0].what


@pytest.mark.parametrize("module", ["aiohttp", "playwright", "pydantic", "tiktoken"])
def test_the_finding_names_the_build_step_to_add(tmp_path: Path, module: str) -> None:
    [finding] = checked(tmp_path, f"import {module}\n{GOOD}").findings
    assert f'{{"type": "shell", "commands": ["pip install {module}==' in finding.fix


@pytest.mark.parametrize("command", ["pip install numpy==2", "sh setup.sh", "./setup", "apt-get install python3-numpy"])
def test_a_build_step_may_have_brought_it(tmp_path: Path, command: str) -> None:
    assert found(checked(tmp_path, f"import numpy\n{GOOD}", build_step(command))) == []


def test_a_module_of_newer_pythons_is_not_in_the_machine(tmp_path: Path) -> None:
    checked(tmp_path)
    assert read_source(load_family(tmp_path / "fam"))
    assert found(checked(tmp_path, f"import compression\n{GOOD}")) == ["warning import-before-install fam.py:1"]
