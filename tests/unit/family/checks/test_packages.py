"""Packages without a version, and imports that no machine can satisfy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from provisioner.family.checks.source import read_source
from provisioner.family.loader import load_family
from tests.unit.family.checks.families import GOOD, checked, found

PINNED = [
    "pip install tabulate==0.9.0 requests===2.0",
    "python3 -m pip install --no-cache-dir -r requirements.txt",
    "pip install -e . ./here /opt/x.whl x.tar.gz",
    "pip install git+https://example.com/a/b@1234567",
    "pip install 'a @ https://example.com/a.whl'",
    "pip install -c constraints.txt tabulate",
    "pip install --index-url https://example.com/simple --target=/x tabulate==1",
    "pip install $PACKAGES `cat list`",
    "pip install --upgrade pip setuptools wheel",
    "pip download tabulate",
    "pip --version && echo install tabulate",
    "apt-get install -y jq",
    "echo 'it is open",
]
UNPINNED = {
    "pip install tabulate": "tabulate",
    "apt update && sudo pip3 install -q --upgrade 'requests>=2' numpy==1": "requests>=2",
    "python -m pip install -t /x pandas[excel]": "pandas[excel]",
    "/usr/local/bin/pip3.11 --quiet install flask  # the server": "flask",
    "pip install git+https://example.com/a/b": "git+https://example.com/a/b",
    "uv pip install --system torch": "torch",
}


def build_step(command: str) -> dict[str, str]:
    return {"build_steps.json": json.dumps([{"type": "shell", "commands": [command]}])}


def installing(code: str) -> str:
    return f"import subprocess\nimport sys\n{GOOD}\n    @staticmethod\n    def install():\n        {code}\n"


@pytest.mark.parametrize("command", PINNED)
def test_pinned_or_unknown_packages_earn_no_warning(tmp_path: Path, command: str) -> None:
    assert "unpinned-package" not in str(found(checked(tmp_path, files=build_step(command))))


@pytest.mark.parametrize("command", UNPINNED)
def test_a_package_without_a_version_is_found(tmp_path: Path, command: str) -> None:
    result = checked(tmp_path, files=build_step(command))
    assert found(result) == ["warning unpinned-package build_steps.json:1"]
    assert repr(UNPINNED[command]) in result.findings[0].what


@pytest.mark.parametrize(
    "code",
    [
        'subprocess.run([sys.executable, "-m", "pip", "install", "tabulate"], check=True)',
        'subprocess.check_call(("pip", "install", "tabulate", *more))',
        'subprocess.run("pip install tabulate", shell=True)',
        'subprocess.run(f"{sys.executable} -m pip install tabulate {more}", shell=True)',
        '_run("pip", "install", "tabulate")',
    ],
    ids=["list", "tuple", "shell", "f-string", "arguments"],
)
def test_a_package_that_install_brings_is_found(tmp_path: Path, code: str) -> None:
    assert found(checked(tmp_path, installing(code))) == ["warning unpinned-package fam.py:33"]


@pytest.mark.parametrize(
    "code",
    [
        'subprocess.run([sys.executable, "-m", "pip", "install", f"tabulate=={VERSION}", name])',
        'print("pip install tabulate")',
        'raise ImportError("pip install tabulate")',
        "subprocess.run(command)",
    ],
    ids=["pinned", "said", "raised", "computed"],
)
def test_nothing_is_said_of_what_is_pinned_said_or_computed(tmp_path: Path, code: str) -> None:
    assert found(checked(tmp_path, installing(code))) == []


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
