"""Tests a program that runs on a recorded terminal, between two terminals."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.waiting import BOUND_SECONDS

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, sys
from pathlib import Path
from provisioner.cli.commands.ssh import run_recorded
from provisioner.recording.casts import Cast
from provisioner.base.redaction import Redactor
from provisioner.base.signals import no_shield
with Cast(Path(sys.argv[1]), "ssh", Redactor({})) as cast:
    sys.exit(run_recorded(sys.argv[2:], {"PATH": os.environ["PATH"]}, cast, no_shield))
"""


def run(directory: Path, *argv: str, typed: bytes = b"") -> tuple[int, bytes]:
    """Runs a program as `provisioner ssh` does; returns its exit code, and what its operator saw."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (33, 99))
    seen = b""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(directory), *argv],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, cwd=ROOT,
    ) as process:  # fmt: skip
        os.close(theirs)
        try:
            while select.select([ours], [], [], BOUND_SECONDS)[0]:
                seen += os.read(ours, 1000)
                if typed and b"ready" in seen:
                    os.write(ours, typed)
                    typed = b""
        except OSError:  # the other side was closed
            pass
        finally:
            os.close(ours)
    return process.returncode, seen


def shown(directory: Path) -> str:
    events = [json.loads(line) for line in (directory / "ssh-1.cast").read_text().splitlines()[1:]]
    return "".join(text for _, kind, text in events if kind == "o")


def test_the_operators_terminal_is_unchanged_and_recorded(tmp_path: Path) -> None:
    script = "stty -echo; stty size; echo ready; read word; echo got $word | tr a-z A-Z; exit 3"
    code, seen = run(tmp_path, "sh", "-c", script, typed=b"hidden\r")
    assert code == 3
    assert seen == b"33 99\r\nready\r\nGOT HIDDEN\r\n"
    assert shown(tmp_path) == seen.decode()
    assert "hidden" not in (tmp_path / "ssh-1.cast").read_text()


@pytest.mark.parametrize(
    ("argv", "code"), [(["sh", "-c", "kill -9 $$"], 137), (["no-such-program"], 127)], ids=["killed", "missing"]
)
def test_a_program_that_does_not_end_by_itself(tmp_path: Path, argv: list[str], code: int) -> None:
    assert run(tmp_path, *argv)[0] == code


def test_typing_arrives_while_the_program_prints(tmp_path: Path) -> None:
    script = "stty raw -echo; echo ready; sleep 0.2; head -c 100000 /dev/zero | tr '\\0' x; head -c 60000 | wc -c"
    code, seen = run(tmp_path, "sh", "-c", script, typed=b"y" * 60_000)
    assert (code, seen.count(b"x")) == (0, 100_000)
    assert seen.rstrip().endswith(b"60000")


def test_a_directory_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    assert run(tmp_path / "gone", "echo", "seen") == (0, b"seen\r\n")
