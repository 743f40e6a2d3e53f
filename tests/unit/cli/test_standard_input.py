"""Tests the standard input of `exec`: pipes, files, terminals, and raw mode, which ends whatever happens."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from provisioner.cli.standard_input import Keys, StandardInput, raw_terminal, terminal_size
from provisioner.errors import HostError, Interrupted
from provisioner.signals import no_shield
from provisioner.ssh.connection import Connection
from provisioner.ssh.login import Login
from provisioner.ssh.terminal_program import resize
from tests.unit.fakes.sshd import Sshd
from tests.unit.ssh.test_connection import login_to
from tests.waiting import BOUND_SECONDS

ROOT = Path(__file__).parents[3]
# `exec -t`, once the machine is found. The last argument is its command, for a shell.
PROGRAM = """
import signal, sys
from pathlib import Path
from provisioner.cli.commands.machines import run_here
from provisioner.models import Endpoint
from provisioner.ssh.login import Login
from provisioner.ssh.connection import Connection
from provisioner.signals import Interrupts
interrupts = Interrupts(print)
interrupts.install()
port, key, host_key, script = sys.argv[1:]
login = Login(Endpoint(host="127.0.0.1", port=int(port)), "root", Path(key), host_key)
with Connection(login) as connection:
    try:
        code = run_here(connection, ["sh", "-c", script], "root", interrupts.shield)
    except KeyboardInterrupt:
        code = 130
sys.exit(code)
"""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Returns the two sides of a terminal, ours first."""
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


@pytest.fixture
def server() -> Iterator[Sshd]:
    with Sshd() as server:
        yield server


def test_a_pipe_has_nothing_yet_then_a_piece_then_an_end() -> None:
    reader, writer = os.pipe()
    source = StandardInput(reader)
    assert source.read(10) is None
    os.write(writer, b"words")
    assert (source.read(3), source.read(10), source.read(10)) == (b"wor", b"ds", None)
    os.close(writer)
    assert source.read(10) == b""
    os.close(reader)


def test_a_file_is_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"contents")
    with (tmp_path / "file").open("rb") as file:
        source = StandardInput(file.fileno())
        assert (source.read(100), source.read(100)) == (b"contents", b"")


def test_a_directory_is_refused(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(HostError, match=r"Standard input cannot be read: Is a directory\."):
        StandardInput(descriptor).read(10)
    os.close(descriptor)


def test_a_terminal_of_another_job_is_empty(terminal: tuple[int, int]) -> None:
    ours, theirs = terminal  # which is no terminal of this process's session
    os.write(ours, b"line\n")
    assert StandardInput(theirs).read(10) == b"line\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp() + 1)
        assert StandardInput(theirs).read(10) == b""


@pytest.mark.parametrize(
    ("typed", "arrives"),
    [
        ([b"ls ~.\r"], b"ls ~.\r"),
        ([b"~~.\r"], b"~.\r"),
        ([b"x\r~", b"x"], b"x\r~x"),
        ([b"~", b"\r"], b"~\r"),
        ([b"a\r\n", b"~", b"~"], b"a\r\n~"),
    ],
    ids=["in a line", "twice", "other key", "line end", "alone"],
)
def test_a_tilde_arrives_unless_a_dot_follows(pipe: tuple[int, int], typed: list[bytes], arrives: bytes) -> None:
    reader, writer = pipe
    keys, got = Keys(StandardInput(reader)), b""
    for piece in typed:
        os.write(writer, piece)
        got += keys.read(100) or b""
    assert (got, keys.read(100)) == (arrives, None)


@pytest.mark.parametrize("typed", [[b"~."], [b"ls\r~."], [b"ls\r", b"~", b"."]], ids=["first", "line", "pieces"])
def test_a_tilde_and_a_dot_on_a_new_line_end_it(pipe: tuple[int, int], typed: list[bytes]) -> None:
    reader, writer = pipe
    keys = Keys(StandardInput(reader))
    for piece in typed[:-1]:
        os.write(writer, piece)
        keys.read(100)
    os.write(writer, typed[-1])
    with pytest.raises(Interrupted):
        keys.read(100)


def test_the_end_of_keys_is_the_end(pipe: tuple[int, int], tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with (tmp_path / "empty").open("rb") as file:
        assert Keys(StandardInput(file.fileno())).read(10) == b""


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit], ids=lambda each: each.__name__)
def test_raw_mode_ends_with_any_exception(terminal: tuple[int, int], error: type[BaseException]) -> None:
    before = termios.tcgetattr(terminal[1])

    def fail() -> None:
        assert termios.tcgetattr(terminal[1]) != before
        raise error

    with pytest.raises(error), raw_terminal(terminal[1], no_shield):
        fail()
    assert termios.tcgetattr(terminal[1]) == before


def test_a_terminals_answers_do_not_reach_the_shell(terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    with raw_terminal(theirs, no_shield):
        os.write(ours, b"\x1b]0;rm -rf ~\x07\r")
        assert select.select([theirs], [], [], BOUND_SECONDS)[0]
    os.write(ours, b"typed later\r")
    assert os.read(theirs, 100) == b"typed later\n"


def test_something_else_than_a_terminal_has_no_size(pipe: tuple[int, int]) -> None:
    assert terminal_size(pipe[0]) == (0, 0)


class OnTerminal:
    """Runs `exec -t` on a terminal, whose other side the test is."""

    def __init__(self, ours: int, theirs: int, login: Login, script: str) -> None:
        self._ours = ours
        self.theirs = theirs
        self.before = termios.tcgetattr(theirs)
        argv = [str(login.endpoint.port), str(login.private_key), login.host_key, script]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *argv], cwd=ROOT, stdin=theirs, stdout=theirs, start_new_session=True
        )
        self._shown = b""

    def types(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def shows(self, pattern: bytes) -> None:
        while not (match := re.search(pattern, self._shown)):
            assert select.select([self._ours], [], [], BOUND_SECONDS)[0], self._shown
            self._shown += os.read(self._ours, 1 << 16)
        self._shown = self._shown[match.end() :]

    def end(self) -> int:
        """Waits for the end, and checks that the terminal is as before."""
        code = self.process.wait(BOUND_SECONDS)
        assert termios.tcgetattr(self.theirs) == self.before
        return code


@pytest.fixture
def on_terminal(server: Sshd, terminal: tuple[int, int], tmp_path: Path) -> Iterator[Callable[[str], OnTerminal]]:
    resize(terminal[1], 33, 99)
    login = login_to(server, tmp_path)
    running: list[OnTerminal] = []

    def run(script: str) -> OnTerminal:
        running.append(OnTerminal(*terminal, login, script))
        return running[-1]

    yield run
    for each in running:
        each.process.kill()
        each.process.wait()


def test_a_terminals_command_has_its_size_keys_and_exit_code(
    on_terminal: Callable[[str], OnTerminal],
) -> None:
    follow = 'until [ "$(stty size)" = "44 111" ]; do sleep 0.1; done'
    run = on_terminal(f'stty size; read line; echo "$TERM got $line"; {follow}; stty size; exit 9')
    run.shows(rb"33 99\r\n")
    run.types(b"it\r")
    run.shows(rb"\w+ got it\r\n")
    resize(run.theirs, 44, 111)
    run.shows(rb"44 111\r\n")
    assert run.end() == 9


def test_ctrl_c_is_for_the_machine(on_terminal: Callable[[str], OnTerminal]) -> None:
    run = on_terminal("trap 'echo interrupted; exit 6' INT; echo begun; while :; do sleep 0.1; done")
    run.shows(rb"begun")
    run.types(b"\x03")
    run.shows(rb"interrupted")
    assert run.end() == 6


@pytest.mark.parametrize("how", ["signal", "escape", "connection"])
def test_the_terminal_is_as_before_when_it_ends_early(
    server: Sshd, on_terminal: Callable[[str], OnTerminal], how: str
) -> None:
    run = on_terminal("echo begun; exec sleep 600")
    run.shows(rb"begun")
    if how == "signal":
        run.process.send_signal(signal.SIGTERM)
    elif how == "escape":
        run.types(b"\r~.")
    else:
        server.cut()
    assert run.end() != 0


def test_a_command_reads_what_comes_while_it_runs(server: Sshd, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    shown: list[bytes] = []

    def answer(data: bytes) -> None:
        """Sends the next line only once the machine has answered the last one."""
        shown.append(data)
        if len(shown) < 3:
            os.write(writer, b"line %d\n" % len(shown))
        elif len(shown) == 3:
            os.close(writer)

    with Connection(login_to(server, tmp_path)) as connection:
        os.write(writer, b"line 0\n")
        done = connection.run(
            ["sh", "-c", "while read -r line; do echo $line; done; echo end"],
            stdin=StandardInput(reader),
            on_stdout=answer,
        )
    os.close(reader)
    assert (done.exit_code, done.stdout) == (0, b"line 0\nline 1\nline 2\nend\n")


def test_a_command_ends_while_its_input_is_open(server: Sshd, tmp_path: Path, pipe: tuple[int, int]) -> None:
    with Connection(login_to(server, tmp_path)) as connection:
        assert connection.run(["sh", "-c", "exit 5"], stdin=StandardInput(pipe[0])).exit_code == 5
