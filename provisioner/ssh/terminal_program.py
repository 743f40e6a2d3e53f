"""Runs a command on a new terminal of a machine. Runs in machines, started by terminal.py.

Its input is frames: a kind (1 byte), the payload's length (4 bytes, big-endian) and the payload. KEYS holds what was
typed, SIZE the terminal's new size. Its output is what the terminal shows. Imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
from typing import NoReturn

KEYS, SIZE = b"k", b"s"
HEADER = struct.Struct(">cI")
ROWS_AND_COLUMNS = struct.Struct("!HH")
PIECE_BYTES = 1 << 15
# How much of what was typed waits for a command that does not read.
WAITING_BYTES = 1 << 16
# What is passed on once the command has ended. A terminal holds less, but background processes may keep writing.
LAST_OUTPUT_BYTES = 1 << 20
# Shells' exit codes for a program that cannot be executed, and for one that does not exist.
CANNOT_EXECUTE, NOT_FOUND = 126, 127


class Terminal:
    """Moves keys and output between this process's streams and a command on a terminal.

    Args:
        pid: the command's process.
        descriptor: the terminal's master side.
    """

    def __init__(self, pid: int, descriptor: int) -> None:
        self._pid = pid
        self._descriptor = descriptor
        self._frames = bytearray()
        self._keys = bytearray()

    def serve(self, woken: int) -> int:
        """Serves until the command has ended, and returns its exit code.

        Args:
            woken: a descriptor that becomes readable when a process has ended.
        """
        is_there, status = True, None
        while status is None:
            poll = select.poll()
            poll.register(woken, select.POLLIN)
            if is_there and len(self._keys) < WAITING_BYTES:
                poll.register(0, select.POLLIN)
            poll.register(self._descriptor, select.POLLIN | (select.POLLOUT if self._keys else 0))
            ready = dict(poll.poll())
            if 0 in ready and not self._hear():
                is_there = False
                os.kill(self._pid, signal.SIGHUP)  # as a terminal does whose line was cut
            self._type()
            if ready.get(self._descriptor, 0) & ~select.POLLOUT and not self._show():
                status = os.waitpid(self._pid, 0)[1]  # no process has the terminal open any more
            elif woken in ready:
                os.read(woken, 100)
                ended, found = os.waitpid(self._pid, os.WNOHANG)
                status = found if ended else None
        left_bytes = LAST_OUTPUT_BYTES
        while left_bytes > 0 and (shown_bytes := self._show()):
            left_bytes -= shown_bytes
        return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def _hear(self) -> bool:
        """Takes a piece of the input; returns whether there may be more."""
        data = os.read(0, PIECE_BYTES)
        self._frames += data
        while len(self._frames) >= HEADER.size:
            kind, length = HEADER.unpack_from(self._frames)
            end = HEADER.size + length
            if len(self._frames) < end:
                break
            payload = bytes(self._frames[HEADER.size : end])
            del self._frames[:end]
            if kind == SIZE:
                resize(self._descriptor, *ROWS_AND_COLUMNS.unpack(payload))
            else:
                self._keys += payload
        return bool(data)

    def _type(self) -> None:
        with contextlib.suppress(OSError):  # the command does not read, or is gone
            while self._keys:
                del self._keys[: os.write(self._descriptor, self._keys)]

    def _show(self) -> int:
        """Passes a piece of output on; returns how many bytes there were."""
        try:
            data = os.read(self._descriptor, PIECE_BYTES)
        except OSError:  # there is none, or the last process has closed the terminal
            return 0
        rest = data
        while rest:
            rest = rest[os.write(1, rest) :]
        return len(data)


def resize(descriptor: int, rows: int, columns: int) -> None:
    """Gives a terminal a size. Its foreground processes get SIGWINCH."""
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _execute(argv: list[str], rows: int, columns: int) -> NoReturn:
    try:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the command would inherit that
            signal.signal(number, signal.SIG_DFL)
        resize(0, rows, columns)
        os.execvp(argv[0], argv)  # noqa: S606 - no shell wanted
    except OSError as error:
        os.write(2, f"{argv[0]}: {os.strerror(error.errno or errno.EIO)}\r\n".encode(errors="replace"))
        os._exit(CANNOT_EXECUTE if error.errno in (errno.EPERM, errno.ENOEXEC, errno.EACCES) else NOT_FOUND)


def main() -> int:
    """Runs the command named by the arguments: rows, columns, program, its arguments. Returns its exit code."""
    rows, columns, argv = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    woken, wake = os.pipe()
    for descriptor in (woken, wake):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    pid, descriptor = pty.fork()
    if pid == 0:
        _execute(argv, rows, columns)
    os.set_blocking(descriptor, False)
    return Terminal(pid, descriptor).serve(woken)


if __name__ == "__main__":
    sys.exit(main())
