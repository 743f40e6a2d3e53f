"""The command `ssh`: OpenSSH with a shell in a machine, which is recorded."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import shlex
import shutil
import signal
import struct
import termios
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Annotated

import typer

from provisioner.base import child_environment
from provisioner.base.errors import HostError
from provisioner.cli.options import EnvironmentArgument, MachineOption, UserOption, machine_and_user
from provisioner.cli.output import Result
from provisioner.cli.sessions import environment_session
from provisioner.cli.standard_input import raw_terminal, terminal_size
from provisioner.machines.connect import authorize, require_alive
from provisioner.recording.casts import Cast
from provisioner.ssh.openssh import ssh_command

# A port that cannot be had here is an error, and a machine that is lost ends the client.
SSH_OPTIONS = ("-oExitOnForwardFailure=yes", "-oServerAliveInterval=15")
READ_BYTES = 64 << 10
# Shells' exit code for a program that does not exist.
NOT_FOUND = 127


def main(
    env: EnvironmentArgument,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Options and a command for OpenSSH, after --.")
    ] = None,
    machine: MachineOption = "primary",
    user: UserOption = None,
) -> Result:
    """Runs OpenSSH's client, which handles terminals well. One without a terminal is not recorded."""
    opened, environment = environment_session(env)
    role, chosen = machine_and_user(environment, machine, user)
    login = opened.environments.login(environment, role, chosen)
    require_alive(opened, environment, role)
    authorize(opened, environment)
    known_hosts = opened.environments.directory(environment.id) / "keys" / f"known_hosts_{role}"
    # OpenSSH takes options after the host as well, and of settings that are given twice, the first.
    command = [*ssh_command(login, known_hosts, *SSH_OPTIONS), *(arguments or ())]
    if shutil.which("ssh") is None:
        raise HostError("ssh is not installed.", hint="sudo apt-get install openssh-client")
    if not (environment.recorded and os.isatty(0) and os.isatty(1)):
        os.execvpe("ssh", command, child_environment.for_terminal(os.environ))  # noqa: S606 - no shell wanted
    size, what = terminal_size(1), shlex.join(["ssh", f"{chosen}@{role}", *(arguments or ())])
    with opened.cast(environment, "ssh", what, size.columns, size.lines) as cast:
        variables = child_environment.for_terminal(os.environ)
        return Result({}, "", run_recorded(command, variables, cast, opened.shield))


def run_recorded(
    argv: list[str], environment: Mapping[str, str], cast: Cast, shield: Callable[[], AbstractContextManager[None]]
) -> int:
    """Runs a program on a terminal of its own, which shows on this process's, and returns its exit code.

    Args:
        argv: the program and its arguments.
        environment: all of its variables.
        shield: returns a context that no signal interrupts.
    """
    with raw_terminal(0, shield):
        pid, theirs = pty.fork()
        if pid == 0:
            try:
                os.execvpe(argv[0], argv, environment)  # noqa: S606 - no shell wanted
            finally:
                os._exit(NOT_FOUND)
        try:
            with _same_size(theirs):
                _copy(theirs, cast)
        finally:
            os.close(theirs)  # a program that still runs is hung up
            status = os.waitpid(pid, 0)[1]
    return code if (code := os.waitstatus_to_exitcode(status)) >= 0 else 128 - code


@contextlib.contextmanager
def _same_size(theirs: int) -> Iterator[None]:
    """Keeps the program's terminal as large as this process's."""

    def resize(*_: object) -> None:
        size = terminal_size(0)
        with contextlib.suppress(OSError):
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, size.columns, 0, 0))

    before = signal.signal(signal.SIGWINCH, resize)
    resize()
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)


def _copy(theirs: int, cast: Cast) -> None:
    """Copies what is typed to the program, and what it shows to the terminal and the recording, until it ends."""
    os.set_blocking(theirs, False)  # it may take less than there is, and must not keep what it shows waiting
    typed = b""
    reads = [0, theirs]
    while True:
        readable, writable, _ = select.select(reads, [theirs] if typed else [], [])
        if theirs in readable:
            try:
                shown = os.read(theirs, READ_BYTES)
            except BlockingIOError:  # there was nothing after all
                continue
            except OSError:  # EIO: it has ended, and all that it has shown was read
                return
            if not shown:
                return
            _write(shown)
            size = terminal_size(0)
            cast.resize(size.columns, size.lines)
            cast.show(shown)
        if writable:
            with contextlib.suppress(OSError):  # it has no room, or has just ended, which the next look shows
                typed = typed[os.write(theirs, typed) :]
        if 0 in readable:
            data = os.read(0, READ_BYTES)
            typed += data
            if not data:  # this terminal hung up
                return
        # What is typed faster than the program reads it waits in the terminal.
        reads = [theirs] if len(typed) >= READ_BYTES else [0, theirs]


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]
