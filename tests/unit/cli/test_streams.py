"""Tests the command line as a process: closed pipes, full disks, other encodings, shell completion."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from provisioner.cli.output import stderr
from provisioner.cli.terminal import TerminalProgress
from tests.waiting import BOUND_SECONDS

ROOT = Path(__file__).parents[3]
PROGRAM = [sys.executable, str(ROOT / "cli.py")]


def variables(home: Path, **others: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(home), "PROVISIONER_HOME": str(home / "home"), **others}


def run(
    arguments: str, home: Path, more: Mapping[str, str] | None = None, program: list[str] = PROGRAM
) -> subprocess.CompletedProcess[str]:
    """Runs a command line in bash, after the program's name; `$@` is the program."""
    return subprocess.run(
        ["bash", "-c", f'"$@" {arguments}', "bash", *program],
        env=variables(home, **(more or {})), capture_output=True, text=True, timeout=BOUND_SECONDS, check=False,
    )  # fmt: skip


def test_results_go_to_stdout_and_the_rest_to_stderr(tmp_path: Path) -> None:
    listed, wrong = run("list --json", tmp_path), run("show ../x --json", tmp_path)
    assert (listed.returncode, json.loads(listed.stdout), listed.stderr) == (
        0,
        {"schema": 1, "ok": True, "environments": [], "orphans": [], "unreadable": []},
        "",
    )
    assert (wrong.returncode, json.loads(wrong.stdout)["error"]["kind"]) == (2, "UsageError")
    assert "error: There is no environment '../x'." in wrong.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", ["list --json", "list", "--help", "image list"])
def test_a_reader_that_has_gone_ends_it_quietly(tmp_path: Path, arguments: str, unbuffered: str) -> None:
    done = run(f"{arguments} | true; exit ${{PIPESTATUS[0]}}", tmp_path, {"PYTHONUNBUFFERED": unbuffered})
    # `true` may end before or after the output came.
    assert (done.returncode in (0, 1), done.stdout, done.stderr) == (True, "", "")


@pytest.mark.parametrize("arguments", ["list --json", "list", "--help"])
def test_a_result_that_cannot_be_written_is_no_success(tmp_path: Path, arguments: str) -> None:
    done = run(f"{arguments} >/dev/full", tmp_path)
    assert (done.returncode, done.stderr) == (3, "error: The output could not be written: No space left on device.\n")


def test_an_error_that_cannot_be_written_keeps_its_exit_code(tmp_path: Path) -> None:
    for arguments in ("show x --json >/dev/full", "show x 2>/dev/full", "show x --debug 2>&-", "show x >&- 2>&-"):
        assert run(arguments, tmp_path).returncode == 2, arguments


def test_closed_streams_are_not_given_to_opened_files(tmp_path: Path) -> None:
    script = "import os,sys; from provisioner.cli.output import prepare; prepare(); sys.exit(os.open(os.devnull, 0))"
    for closed in (">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"):
        done = run(closed, tmp_path, {"PYTHONPATH": str(ROOT)}, [sys.executable, "-c", script])
        assert done.returncode > 2, closed


def test_unread_progress_output_blocks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as nobody:  # noqa: PTH123 - a descriptor
        monkeypatch.setattr(sys, "stderr", nobody)
        progress = TerminalProgress()
        progress.phase_started("destroy")
        progress.note("Clearing away")
        progress.output("x" * 100_000 + "\n")
        progress.phase_finished("destroy", 1.0)
        monkeypatch.undo()


def test_progress_on_a_terminal_that_hung_up_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, terminal = os.openpty()
    with open(terminal, "w") as stderr:  # noqa: PTH123 - a descriptor
        monkeypatch.setattr(sys, "stderr", stderr)
        progress = TerminalProgress()
        progress.phase_started("boot")
        os.close(controller)
        progress.note("Clearing away")
        progress.phase_finished("boot", 1.0)
        monkeypatch.undo()


def test_characters_that_the_terminal_does_not_know_are_escaped(tmp_path: Path) -> None:
    code = "from provisioner.cli import output; output.prepare(); "
    code += "output.render(output.Result({}, 'caf\\u00e9 \\ud800'), as_json=False)"
    more = {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = run("", tmp_path, more, [sys.executable, "-c", code])
    assert (done.returncode, done.stdout) == (0, "caf\\xe9 \\ufffd\n")


def test_names_that_are_not_text_are_shown_escaped(tmp_path: Path) -> None:
    done = run("show $'\\xff' --json", tmp_path)
    assert json.loads(done.stdout)["error"]["message"] == "There is no environment '\\udcff'."
    assert "'\\udcff'" in done.stderr


def test_an_unknown_user_in_the_path_of_the_home_is_explained(tmp_path: Path) -> None:
    done = run("list", tmp_path, {"PROVISIONER_HOME": "~no-such-user/x"})
    assert (done.returncode, "Set PROVISIONER_HOME" in done.stderr, "Traceback" in done.stderr) == (3, True, False)
    completion = {"_PROVISIONER_COMPLETE": "complete_bash", "COMP_WORDS": "provisioner show e", "COMP_CWORD": "2"}
    done = run("", tmp_path, {"PROVISIONER_HOME": "~no-such-user/x", **completion})
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_the_completion_script_is_shown_for_the_shell_that_asks(tmp_path: Path) -> None:
    done = run("--show-completion; exit", tmp_path)
    assert "complete -o default -F _provisioner_completion provisioner" in done.stdout


def test_a_signal_handlers_line_during_another_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    stream = stderr()

    class Interrupted(io.RawIOBase):
        """A stream during whose write a signal arrives."""

        def writable(self) -> bool:
            return True

        def fileno(self) -> int:
            return writer

        def write(self, data: Any) -> int:
            stream.write("from the handler\n")
            return os.write(writer, data)

    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(Interrupted())))
    stream.write("a line\n")
    assert os.read(reader, 1000) == b"from the handler\na line\n"
    os.close(reader)
