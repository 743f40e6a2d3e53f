"""Tests the standard input of `exec`: pipes, files, terminals, and raw mode, which ends whatever happens."""

from __future__ import annotations

import os
import pty
import select
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.base.errors import HostError
from provisioner.base.signals import no_shield
from provisioner.cli.standard_input import StandardInput, raw_terminal, terminal_size
from provisioner.ssh.connection import Connection
from tests.unit.fakes.sshd import Sshd
from tests.unit.ssh.test_connection import login_to
from tests.waiting import BOUND_SECONDS


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
