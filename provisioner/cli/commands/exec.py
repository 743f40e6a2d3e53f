"""The command `exec`: runs a command in a machine."""

from __future__ import annotations

import os
import select
from typing import Annotated

import typer

from provisioner.base.printable import PrintableStream
from provisioner.cli.options import EnvironmentArgument, MachineOption, UserOption, machine_and_user
from provisioner.cli.output import Result, streams
from provisioner.cli.sessions import environment_session
from provisioner.cli.standard_input import StandardInput
from provisioner.machines.connect import connect_kept


def main(
    env: EnvironmentArgument,
    arguments: Annotated[list[str], typer.Argument(metavar="CMD...", help="Command to run, after --.")],
    machine: MachineOption = "primary",
    user: UserOption = None,
    as_json: bool = False,
) -> Result:
    """Runs a command with this process's stdin, passes its output on and ends with its exit code.

    The output is unchanged, except on a terminal, which the machine must not control.
    """
    opened, environment = environment_session(env)
    role, chosen = machine_and_user(environment, machine, user)
    out, err = (None, None) if as_json else (_Output(1), _Output(2))
    with connect_kept(opened, environment, role) as connection:
        done = connection.run(
            arguments, user=chosen, stdin=StandardInput(), on_stdout=out, on_stderr=err, timeout_seconds=None
        )
    for output in filter(None, (out, err)):
        output.end()
    data = {
        "environment": environment.id,
        "exit_code": done.exit_code,
        **streams(
            done.stdout.decode(errors="replace"),
            done.stderr.decode(errors="replace"),
            done.stdout_size,
            done.stderr_size,
        ),
    }
    return Result(data, "", done.exit_code)


class _Output:
    """Writes a command's output to a descriptor of ours: made printable if that is a terminal, otherwise unchanged."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._printable = PrintableStream() if os.isatty(descriptor) else None

    def __call__(self, data: bytes) -> None:
        _write(self._descriptor, self._printable.feed(data).encode() if self._printable else data)

    def end(self) -> None:
        """Writes what was held back."""
        if self._printable:
            _write(self._descriptor, self._printable.flush().encode())


def _write(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another program left it so; all programs that have it open share the flag
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
