"""Runs commands of a machine on a terminal there: sends what is typed and the terminal's size, and passes output on.

What the machine shows is not made printable: an operator that asks for a terminal lets the machine control it, as ssh
does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from provisioner.frames import HEADER, frame
from provisioner.ssh import terminal_program
from provisioner.ssh.calls import Calls
from provisioner.ssh.exchange import LiveInput
from provisioner.ssh.terminal_program import KEYS, ROWS_AND_COLUMNS, SIZE

Size = Callable[[], os.terminal_size]
# The kernel's limit for each of a size's numbers.
LONGEST_SIDE = 0xFFFF


class TerminalInput:
    """Turns what is typed, and changes of the terminal's size, into the program's frames.

    Args:
        keys: what is typed.
        size: returns the terminal's size now.
    """

    def __init__(self, keys: LiveInput, size: Size) -> None:
        self._keys = keys
        self._size = size
        self.sent_size = size()

    def read(self, limit_bytes: int, /) -> bytes | None:
        """Takes a frame: None if there is none yet, empty at the end."""
        if (size := self._size()) != self.sent_size:
            self.sent_size = size
            return frame(SIZE, ROWS_AND_COLUMNS.pack(*rows_and_columns(size)))
        data = self._keys.read(limit_bytes - HEADER.size)
        return frame(KEYS, data) if data else data

    def fileno(self) -> int:
        """Returns the descriptor of what is typed."""
        return self._keys.fileno()


def rows_and_columns(size: os.terminal_size) -> tuple[int, int]:
    """Returns a size in the kernel's order, within its bounds."""
    return min(max(size.lines, 0), LONGEST_SIDE), min(max(size.columns, 0), LONGEST_SIDE)


def run_on_terminal(
    connection: Calls,
    argv: Sequence[str],
    *,
    user: str,
    kind: str,
    keys: LiveInput,
    size: Size,
    show: Callable[[bytes], None],
) -> int:
    """Runs a command on a terminal of the machine, and returns its exit code.

    Args:
        user: the user that runs it, in that user's home.
        kind: the terminal's kind, for TERM.
        keys: what is typed. Its end hangs the machine's terminal up.
        size: returns the size of the terminal on this side.
        show: takes what the machine's terminal shows, unchanged, and what the machine says if it cannot start one.

    Raises:
        MachineLostError, TaskError: as for Calls.run.
    """
    typed = TerminalInput(keys, size)
    rows, columns = rows_and_columns(typed.sent_size)
    done = connection.run(
        ["terminal_program.py", str(rows), str(columns), *argv],
        user=user,
        environment={"TERM": kind},
        program=Path(terminal_program.__file__).read_text(),
        stdin=typed,
        on_stdout=show,
        on_stderr=show,
        timeout_seconds=None,
        limit_bytes=0,
    )
    return done.exit_code
