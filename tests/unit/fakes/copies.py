"""Machines for copies of files: one that answers with any bytes, and one that is this host. Builds such answers."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, cast

from provisioner.copying.copy_program import DIRECTORY, END, FILE, PIECE, PIECE_BYTES, UP
from provisioner.ssh.connection import Connection
from provisioner.ssh.exchange import Completed
from provisioner.ssh.exec_frames import frame
from tests.unit.fakes.exec_call import GUEST_PYTHON


def file(name: bytes, content: bytes = b"content", kind: bytes = FILE) -> bytes:
    """Returns the frames of a file."""
    begins = range(0, len(content) + 1, PIECE_BYTES)
    return frame(kind, name) + b"".join(frame(PIECE, content[begin : begin + PIECE_BYTES]) for begin in begins)


def directory(name: bytes, *entries: bytes) -> bytes:
    """Returns the frames of a directory with entries."""
    return frame(DIRECTORY, name) + b"".join(entries) + frame(UP)


def tree(*entries: bytes) -> bytes:
    """Returns the whole answer for a directory with entries."""
    return directory(b"", *entries) + frame(END)


class HostileMachine:
    """Answers every command with the same bytes, whatever it is asked."""

    def __init__(self, answer: Iterable[bytes], exit_code: int = 0) -> None:
        self._answer, self._exit_code = answer, exit_code

    @property
    def connection(self) -> Connection:
        """Returns the connection to it."""
        return cast(Connection, self)

    def run(
        self,
        _: Sequence[str],
        *,
        on_stdout: Callable[[bytes], None],
        limit_bytes: int,
        timeout_seconds: float,
        **__: str,
    ) -> Completed:
        """Passes the answer to the listener."""
        assert limit_bytes < 1 << 20
        assert 0 < timeout_seconds <= 24 * 3600
        for piece in self._answer:
            on_stdout(piece)
        return Completed(self._exit_code, b"", b"no such file")


class ThisHost:
    """Runs commands here, as this process's user."""

    @property
    def connection(self) -> Connection:
        """Returns the connection to it."""
        return cast(Connection, self)

    def run(
        self,
        argv: Sequence[str],
        *,
        program: str,
        stdin: bytes | IO[bytes] = b"",
        on_stdout: Callable[[bytes], None] | None = None,
        **_: float | str,
    ) -> Completed:
        """Runs a program with its input, and its output for the listener."""
        with tempfile.TemporaryFile() as spool:
            spool.write(stdin if isinstance(stdin, bytes) else stdin.read())
            spool.seek(0)
            command = _python(argv, program)
            with subprocess.Popen(command, stdin=spool, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
                assert process.stdout is not None
                assert process.stderr is not None
                while data := process.stdout.read(1 << 16):
                    assert on_stdout, data
                    on_stdout(data)
                said = process.stderr.read()
        return Completed(process.returncode, b"", said)


def _python(argv: Sequence[str], program: str) -> list[str]:
    return [GUEST_PYTHON, "-I", "-S", "-c", program, *argv[1:]]


def pieces(answer: bytes, size: int = 4096) -> Iterator[bytes]:
    """Cuts an answer into pieces, as a connection does."""
    return (answer[begin : begin + size] for begin in range(0, len(answer), size))
