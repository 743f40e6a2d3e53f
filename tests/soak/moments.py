"""Runs a program of ours that kills itself, by SIGKILL, at one moment of its work: just before one of its effects.

Usage: python -m tests.soak.moments MOMENT PROGRAM [ARGUMENT...]

PROGRAM is a module or a file. A moment is an effect that Python's audit events tell of (a file that is written, moved
or removed, a program that is started, a connection, a lock) or a command to QEMU, by its first occurrence, as in
"os.rename .building-x-x": any id counts as x. The moment "+SECONDS" is so long after the start; the moment
"-" never comes, and the program prints all that it passes to stderr.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from provisioner.clouds.local.vm import qemu

# Events whose first argument is a path, or the descriptor of a file.
PATHS = (
    "os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate",
    "fcntl.flock", "shutil.copyfile", "shutil.rmtree",
)  # fmt: skip
KILLED = -signal.SIGKILL
# The last effect of making a template.
TEMPLATE_MADE = "os.rename .building-x-x"
PREFIX = "moment: "


def moment(event: str, arguments: tuple[Any, ...]) -> str | None:
    """Names the effect of an audit event; None if it has none."""
    if event == "open":
        path, mode, flags = arguments
        return _named(event, path) if (mode or "r").strip("bt") != "r" or (flags or 0) & os.O_ACCMODE else None
    if event == "tests.qmp":
        return f"qmp {arguments[0]}"
    if event == "socket.connect":
        return _named(event, arguments[1])
    if event == "subprocess.Popen":
        argv = [os.fspath(each) for each in arguments[1]]
        return _named(event, argv[2] if argv[1:2] == ["-m"] else argv[_program_at(argv)])
    return _named(event, arguments[0]) if event in PATHS else None


def _named(event: str, path: Any) -> str:
    if isinstance(path, int):
        path = os.readlink(f"/proc/self/fd/{path}")  # noqa: PTH115 - runs within pathlib's own calls
    name = os.path.basename(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else ""  # noqa: PTH119
    # mkstemp's names end with what is random.
    name = re.sub(r"^(\..+)\.[a-z0-9_]{8}$", r"\1", name)
    return f"{event} {re.sub(r'[0-9a-f]{8,}', 'x', name)}"


def _program_at(argv: list[str]) -> int:
    """Where a command line names its program: after the last of those that only prepare for it."""
    return max((number + 1 for number, word in enumerate(argv[:-1]) if word == "--"), default=0)


class Killer:
    """Watches the effects of this process.

    Args:
        wanted: the moment to die at.
    """

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        self._seen: set[str] = set()

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Handles one audit event."""
        reached = moment(event, arguments)
        if reached is None or reached in self._seen:
            return
        self._seen.add(reached)
        if reached == self._wanted:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._wanted == "-":
            os.write(2, f"{PREFIX}{reached}\n".encode())


def tell_of_qmp() -> None:
    """Has each command to QEMU make an audit event."""
    execute = qemu.QMP.execute

    def told(self: qemu.QMP, name: str, *others: Any, **arguments: Any) -> Any:
        sys.audit("tests.qmp", name)
        return execute(self, name, *others, **arguments)

    qemu.QMP.execute = told  # type: ignore[method-assign,assignment]


def passed(stderr: str) -> list[str]:
    """Returns the moments that a program printed, in their order."""
    return [line.removeprefix(PREFIX) for line in stderr.splitlines() if line.startswith(PREFIX)]


def through(wanted: str) -> tuple[str, ...]:
    """Returns the module and argument that run a program as this does."""
    return ("tests.soak.moments", wanted)


def run(wanted: str, *program: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program until its moment comes, or its end."""
    argv = [sys.executable, "-m", *through(wanted), *program]
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **options)


def main() -> None:
    """Runs the program that the command line names."""
    wanted, program = sys.argv[1:3]
    sys.dont_write_bytecode = True  # only the first run of new code would do that
    if wanted.startswith("+"):
        timer = threading.Timer(float(wanted), os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    tell_of_qmp()
    sys.argv = sys.argv[2:]
    sys.addaudithook(Killer(wanted))
    if Path(program).is_file():
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
