"""The attacker writes the family, and waits for `provisioner check`, `run` or `up` on the controller.

Nothing of the family may run there, and nothing in it may take the controller's memory, its time, or its terminal.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from provisioner.family.check import check_family
from provisioner.family.findings import MAXIMUM_FINDINGS
from tests.campaigns import cases
from tests.command_line import ROOT
from tests.unit.conftest import CommandLine
from tests.unit.family.families import GOOD, TASKS, VARIABLES, changed, checked

MEASURE = """
import sys, time
from pathlib import Path
from provisioner.base.errors import ProvisionerError
from provisioner.family.check import check_family
try:
    check_family(Path(sys.argv[1]), "task", {"TOKEN": "12345678"})
except ProvisionerError:
    pass
# Not getrusage's ru_maxrss: a child that shares its parent's memory until it begins a program counts that too.
[memory] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")]
print(memory, time.process_time())
"""
MEMORY_MIB = 600
SECONDS = 20  # of a CPU


def nested(opening: str, closing: str, depth: int) -> str:
    return f"{opening * depth}0{closing * depth}"


def repeated(begin: str, piece: str, count: int, end: str) -> str:
    return begin + "".join(piece.replace("#", str(number)) for number in range(count)) + end


BOMBS = {
    "numbers": repeated(f"{GOOD}\nx = [", "0,", 299_000, "]\n"),
    "more numbers": repeated(f"{GOOD}\nx = [", "0,", 2_000_000, "]\n"),
    "elifs": repeated(f"{GOOD}\nif 0: pass\n", "elif 1: pass\n", 20_000, ""),
    "brackets": f"{GOOD}\nx = {nested('[', ']', 199)}\n",
    "sums": f"{GOOD}\nx = {'1+' * 900}1\n",
    "default": changed("def start(t):", f"def start(t, x={'-' * 900}1, y=0, *, z):"),
    "aux VM": f"{GOOD}\n    @staticmethod\n    def get_aux_vm_spec(t):\n        return {nested('[', ']', 190)}\n",
    "tasks": changed(TASKS, repeated("return {", "'task #': 1,", 9_000, "}")),
    "long tasks": changed(TASKS, repeated("return {", f"'{'x' * 240}#': 1,", 9_000, "}")),
    "bad variables": changed(VARIABLES, repeated("required_environment_variables = [", "'A #',", 30_000, "]")),
    "functions": repeated(GOOD, "    def get_task#(): pass\n", 5_000, ""),
    "imports": repeated("", "import x#\n", 30_000, GOOD),
    "installs": repeated(f"{GOOD}\n", "run(['pip', 'install', 'a', 'b', 'c'])\n", 3_000, ""),
    "steps": repeated(f"{GOOD}\nx = [", "{'type': 'shell', 'commands': ['echo (']},\n", 3_000, "]"),
}
# These take more than a few seconds.
LONG = {"numbers", "more numbers"}


@pytest.mark.parametrize("bomb", cases(BOMBS, left=LONG))
def test_no_module_takes_the_memory_or_the_time(tmp_path: Path, bomb: str) -> None:
    (tmp_path / "fam").mkdir()
    (tmp_path / "fam" / "fam.py").write_text(BOMBS[bomb])
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "fam")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    memory_kib, seconds = done.stdout.split()
    assert int(memory_kib) >> 10 < MEMORY_MIB
    assert float(seconds) < SECONDS


OTHERS = {
    "globs": {"manifest.yaml": repeated("tasks: {}\ninstall_inputs:\n", "- '**/*a*a*a*#*/**/*a*a*b*/**'\n", 100, "")},
    "manifest": {"manifest.yaml": repeated("tasks:\n", "  name of a task that no family has #: {}\n", 5_000, "")},
    "step": {"build_steps.json": json.dumps([{"type": "shell", "commands": ["echo ("] * 200_000}])},
    "long command": {"build_steps.json": json.dumps([{"type": "shell", "commands": ["echo $(" * 300_000]}])},
    "deep command": {"build_steps.json": json.dumps([{"type": "shell", "commands": ["echo $(" * 30_000]}])},
    "deep brackets": {"build_steps.json": json.dumps([{"type": "shell", "commands": ["{ ( " * 30_000]}])},
    "pip": {"build_steps.json": json.dumps([{"type": "shell", "commands": ["pip install " + "a " * 7_000] * 200}])},
}


@pytest.mark.parametrize("name", OTHERS)
def test_no_other_file_takes_the_time(tmp_path: Path, name: str) -> None:
    begin = time.process_time()
    findings = checked(tmp_path, files=OTHERS[name]).findings
    assert len(findings) <= MAXIMUM_FINDINGS + 1
    assert time.process_time() - begin < SECONDS


def test_only_the_beginnings_of_large_files_are_read(tmp_path: Path) -> None:
    checked(tmp_path)
    with (tmp_path / "fam" / "large").open("wb") as file:
        file.truncate(7 << 30)
    begin = time.process_time()
    check_family(tmp_path / "fam")
    assert time.process_time() - begin < SECONDS / 4


def test_nothing_of_a_family_runs(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    tmp_path.chmod(0o777)
    code = f"open({str(mark)!r}, 'w')\n"
    files = dict.fromkeys(("__init__.py", "conftest.py", "sitecustomize.py", "json.py", "test_fam.py"), code)
    command = f"touch {mark}; $(touch {mark}); : > {mark}; set +n; touch {mark}"
    files["build_steps.json"] = json.dumps(
        [{"type": "shell", "commands": [command, "x=$((y[$(touch " + str(mark) + ")]))"]}]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        checked(tmp_path, code + changed("def start(t):", f"def start(t, x={code.strip()}):"), files, task="easy")
    assert not mark.exists()


def test_no_words_of_a_family_steer_the_terminal(provisioner: CommandLine, tmp_path: Path) -> None:
    escape = "\x1b[2J\x1b]0\x07\u202e"
    text = changed(TASKS, f"return {{'a{escape}': 1}}")
    (tmp_path / "fam").mkdir()
    (tmp_path / "fam" / "manifest.yaml").write_text(f"tasks: {{{json.dumps(escape)}: {{}}}}")
    (tmp_path / "fam" / "fam.py").write_text(text)
    (tmp_path / "fam" / "build_steps.json").write_text(
        json.dumps([{"type": "shell", "commands": [f"pip install 'a{escape}'", "echo ("]}])
    )
    (tmp_path / "fam" / f"a{escape}").write_text("sk-ant-" + "a1" * 20)
    done = provisioner("check", str(tmp_path / "fam"))
    rules = set(re.findall(r"\[([a-z-]+)\]", done.stdout))
    assert rules == {"unknown-manifest-task", "secret-in-file"}
    assert (done.stdout + done.stderr).replace("\n", "").isprintable()
