"""Tests the shell's completion in the real shells: on a terminal, with the keys that an operator presses."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Completes as the real program does, and shows its arguments when it is run.
PROGRAM = f"""#!/bin/sh
if [ -n "$_PROVISIONER_COMPLETE" ] || [ "$1" = --install-completion ]; then
    exec {sys.executable} {ROOT / "cli.py"} "$@"
fi
printf '{{'
printf '<%s>' "$@"
printf '}}\\n'
"""
TAB, ENTER = "\t", "\r"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory with a program, environments, and other files."""
    for directory in (
        "bin",
        "home/environments/echo-main-bcd234",
        "home/archive/past-xyz234",
        "my_family",
        "agent dir",
    ):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "secrets.env").touch()
    (tmp_path / "bin" / "provisioner").write_text(PROGRAM)
    (tmp_path / "bin" / "provisioner").chmod(0o755)
    return tmp_path


class Shell:
    """Runs a shell on a terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def runs(self, line: str) -> list[str]:
        """Types a line with its TABs, and returns the arguments with which the program ran."""
        os.write(self._descriptor, f"{line}{ENTER}".encode())
        shown = ""
        while not (match := re.search(r"\{((?:<[^<>]*>)+)\}", shown)):
            shown += os.read(self._descriptor, 1 << 16).decode()
        return [argument.removesuffix("/") for argument in re.findall(r"<([^<>]*)>", match[1])]  # zsh drops it, too


@contextmanager
def shell(home: Path, name: str) -> Iterator[Shell]:
    """Starts a shell for which the completion was installed by the program itself."""
    program = shutil.which(name)
    assert program, f"{name} is not installed: scripts/setup dev"
    variables = {
        "HOME": str(home), "PATH": f"{home / 'bin'}:{os.environ['PATH']}", "PROVISIONER_HOME": str(home / "home"),
        "TERM": "xterm", "LC_ALL": "C.UTF-8",
    }  # fmt: skip
    # Else fish reads all manual pages first.
    (home / ".local" / "share" / "fish" / "generated_completions").mkdir(parents=True)
    # Not as the last command, for which the shell would make room.
    subprocess.run(
        [program, "-c", "provisioner --install-completion; true"],
        env=variables,
        cwd=home,
        check=True,
        capture_output=True,
    )
    pid, descriptor = pty.fork()
    if pid == 0:
        os.chdir(home)
        os.execvpe(program, [program, "-i"], variables)
    try:
        yield Shell(descriptor)
    finally:
        os.close(descriptor)
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    "name", ["bash", pytest.param("zsh", marks=pytest.mark.campaign), pytest.param("fish", marks=pytest.mark.campaign)]
)
def test_the_shell_completes_environments_options_and_files(home: Path, name: str) -> None:
    with shell(home, name) as typed:
        assert typed.runs(f"provisioner check my_fa{TAB}") == ["check", "my_family"]
        assert typed.runs(f"provisioner exec e{TAB}-- id") == ["exec", "echo-main-bcd234", "--", "id"]
        assert typed.runs(f"provisioner logs pa{TAB}--ta{TAB}9") == ["logs", "past-xyz234", "--tail", "9"]
        assert typed.runs(f"provisioner up my_family other --env-file sec{TAB}")[-1] == "secrets.env"
        assert typed.runs(f"provisioner agent echo age{TAB}") == ["agent", "echo", "agent dir"]
