"""The command line's beginning and end: a signal ends it without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import ROOT

# Runs cli.py, and sends it a signal when it begins to import a module.
PROGRAM = """
import os, runpy, sys

_, module, number, *sys.argv[:] = sys.argv
sys.modules.pop(module, None)

class Interruption:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), int(number))

sys.meta_path.insert(0, Interruption())
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("number", "code", "module"),
    [(signal.SIGINT, -signal.SIGINT, "signal"), (signal.SIGINT, 130, "provisioner.cli"), (signal.SIGTERM, 143, "typer"),
     (signal.SIGHUP, 129, "provisioner.base.models"),
     (signal.SIGINT, 130, "provisioner.store.environments"), (signal.SIGTERM, 143, "provisioner.store.environments")],
    ids=["signal", "first import", "typer", "command", "interrupted command", "terminated command"],
)  # fmt: skip
def test_a_signal_during_an_import_ends_it(tmp_path: Path, number: signal.Signals, code: int, module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module, str(int(number)), str(ROOT / "cli.py"), "list"],
        env={**os.environ, "PROVISIONER_HOME": str(tmp_path / "home")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert "Traceback" not in done.stderr
