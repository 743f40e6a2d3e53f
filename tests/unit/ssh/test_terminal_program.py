"""Tests the program that runs a command on a terminal, as a process of this host."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from provisioner.ssh import terminal_program
from provisioner.ssh.terminal_program import HEADER, KEYS, LAST_OUTPUT_BYTES, ROWS_AND_COLUMNS, SIZE
from tests.waiting import BOUND_SECONDS


class Machine:
    """Runs the program with a command, and reads what the terminal shows."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._shown = b""

    def send(self, kind: bytes, payload: bytes) -> None:
        assert self.process.stdin
        self.process.stdin.write(HEADER.pack(kind, len(payload)) + payload)
        self.process.stdin.flush()

    def shows(self, pattern: bytes) -> re.Match[bytes]:
        """Reads until the output matches."""
        assert self.process.stdout
        while not (match := re.search(pattern, self._shown)):
            piece = os.read(self.process.stdout.fileno(), 1 << 16)
            assert piece, self._shown
            self._shown += piece
        return match

    def end(self) -> int:
        assert self.process.stdout
        self._shown += self.process.stdout.read()
        return self.process.wait(BOUND_SECONDS)


@pytest.fixture
def started() -> Iterator[Callable[..., Machine]]:
    processes: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> Machine:
        argv = [sys.executable, "-I", "-S", terminal_program.__file__, "31", "97", *command]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        processes.append(process)
        return Machine(process)

    yield start
    for process in processes:
        process.kill()
        with process:
            pass


@pytest.mark.parametrize(
    ("script", "code"), [("exit 7", 7), ("kill -TERM $$", 143), ("true", 0)], ids=["code", "signal", "success"]
)
def test_the_exit_code_is_the_commands(started: Callable[..., Machine], script: str, code: int) -> None:
    assert started("sh", "-c", script).end() == code


@pytest.mark.parametrize(
    ("program", "code", "says"),
    [("/no/program", 127, b"No such file"), ("/etc/passwd", 126, b"denied")],
    ids=["missing", "forbidden"],
)
def test_a_program_that_cannot_start_has_a_shells_exit_code(
    started: Callable[..., Machine], program: str, code: int, says: bytes
) -> None:
    machine = started(program)
    assert machine.end() == code
    machine.shows(says)


def test_a_terminals_command_follows_changes_of_its_size(started: Callable[..., Machine]) -> None:
    show = "test -t 0 && test -t 1 && test -t 2 && stty size"
    script = f"{show}; trap 'stty size; exit 3' WINCH; echo set; while :; do read x; done"
    machine = started("bash", "-c", script)
    machine.shows(rb"31 97\r\n")
    machine.shows(rb"set")
    machine.send(SIZE, ROWS_AND_COLUMNS.pack(40, 120))
    machine.send(KEYS, b"\n")
    machine.shows(rb"40 120\r\n")
    assert machine.end() == 3


def test_keys_reach_the_command_and_ctrl_c_interrupts_it(started: Callable[..., Machine]) -> None:
    script = "trap 'echo stopped; exit 5' INT; read line; echo \"got $line\"; while :; do read line; done"
    machine = started("sh", "-c", script)
    machine.send(KEYS, b"word\r")
    machine.shows(rb"got word")
    # A shell that the signal finds before its `read` looks at it after that.
    machine.send(KEYS, b"\x03\r")
    machine.shows(rb"stopped")
    assert machine.end() == 5


def test_a_long_output_arrives_whole(started: Callable[..., Machine]) -> None:
    machine = started("sh", "-c", "seq 200000; echo the end")
    machine.shows(rb"199999\r\n200000\r\nthe end")
    assert machine.end() == 0


def test_a_background_process_does_not_hold_the_terminal(started: Callable[..., Machine]) -> None:
    machine = started("bash", "-c", "trap '' HUP; sleep 1000 & echo pid $!; exit 4")
    assert machine.end() == 4
    left = int(machine.shows(rb"pid (\d+)")[1])
    os.kill(left, signal.SIGKILL)  # it was still there


def test_a_background_process_does_not_keep_the_terminal(started: Callable[..., Machine], tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    machine = started("bash", "-c", f"trap '' HUP; yes & read line; touch {ended}; exit 4")
    assert machine.process.stdout
    shown_bytes = later_bytes = 0
    while piece := os.read(machine.process.stdout.fileno(), 4096):  # slower than what comes
        if shown_bytes < LAST_OUTPUT_BYTES // 4 <= shown_bytes + len(piece):
            machine.send(KEYS, b"\n")
        shown_bytes += len(piece)
        later_bytes += len(piece) if ended.exists() else 0
        assert later_bytes < 4 * LAST_OUTPUT_BYTES
        time.sleep(0.001)
    assert machine.process.wait(BOUND_SECONDS) == 4


def test_the_end_of_the_input_hangs_the_terminal_up(started: Callable[..., Machine]) -> None:
    machine = started("sh", "-c", "echo begun; exec sleep 100")
    machine.shows(rb"begun")
    assert machine.process.stdin
    machine.process.stdin.close()
    assert machine.end() == 129


def test_keys_wait_for_a_command_that_does_not_read(started: Callable[..., Machine]) -> None:
    machine = started("sh", "-c", "stty raw -echo; echo begun; sleep 2; exec head -c 300000 | wc -c")
    machine.shows(rb"begun")
    for _ in range(10):
        machine.send(KEYS, b"x" * 30_000)
    machine.shows(rb"300000")
    assert machine.end() == 0
