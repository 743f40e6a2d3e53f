"""Imports that no machine can satisfy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from provisioner.errors import TaskFamilyError
from provisioner.family.checks.family_check import refuse_mistakes
from provisioner.family.loader import load_family
from tests.unit.family.checks.families import GOOD, checked, found


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


def test_the_finding_names_the_build_step_to_add(tmp_path: Path) -> None:
    [finding] = checked(tmp_path, f"import pydantic\n{GOOD}").findings
    assert '{"type": "shell", "commands": ["pip install <PACKAGE>"]}' in finding.fix


def test_any_command_of_a_build_step_may_have_brought_it(tmp_path: Path) -> None:
    steps = json.dumps([{"type": "shell", "commands": ["./setup"]}])
    assert found(checked(tmp_path, f"import numpy\n{GOOD}", {"build_steps.json": steps})) == []


def manifest(*globs: str) -> dict[str, str]:
    return {"manifest.yaml": f"tasks: {{}}\ninstall_inputs: {list(globs)}\n"}


def test_a_glob_that_matches_nothing_is_found(tmp_path: Path) -> None:
    result = checked(tmp_path, files={"requirements.txt": "", **manifest("requirements.txt", "asets/**")})
    assert found(result) == ["warning unmatched-glob manifest.yaml"]
    assert "'asets/**'" in result.findings[0].what


def test_a_module_that_install_would_not_find_is_refused(tmp_path: Path) -> None:
    result = checked(tmp_path, f"import words\n{GOOD}", {"words.py": "", **manifest()})
    assert found(result) == ["error import-before-install fam.py:1"]
    with pytest.raises(TaskFamilyError, match=r"leaves words\.py out"):
        refuse_mistakes(load_family(tmp_path / "fam"), None, {})


@pytest.mark.parametrize("globs", [("words.py",), ("*.py",)], ids=["by name", "by glob"])
def test_a_module_that_install_finds_is_left_alone(tmp_path: Path, globs: tuple[str, ...]) -> None:
    assert found(checked(tmp_path, f"import words\n{GOOD}", {"words.py": "", **manifest(*globs)})) == []
