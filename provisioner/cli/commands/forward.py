"""The command `forward`, which brings a machine's TCP port to this host's loopback."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from provisioner.cli.command import command
from provisioner.cli.commands.machines import MachineOption, machine_role
from provisioner.cli.options import EnvironmentArgument
from provisioner.cli.output import Result
from provisioner.cli.sessions import environment_session
from provisioner.errors import HostError, UsageError
from provisioner.machines.connect import connect
from provisioner.signals import exit_code
from provisioner.ssh.forwarding import LOOPBACK, Forwarder, listen

HIGHEST_PORT = 65535


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "forward")(forward)


def forward(
    env: EnvironmentArgument,
    ports: Annotated[str, typer.Argument(metavar="PORT[:LOCAL]", help="The machine's port, and the one on this host.")],
    machine: MachineOption = "primary",
) -> Result:
    """Carries connections to a port of this host's loopback on to a machine, until Ctrl-C."""
    port, local = parse_ports(ports)
    opened, environment = environment_session(env)
    role = machine_role(environment, machine)
    try:
        listener = listen(local, preferred=port)
    except OSError as error:
        raise HostError(
            f"Port {local} of this host cannot be opened: {error.strerror}.",
            hint="Without :LOCAL, a free port is chosen.",
        ) from error
    try:
        connection = connect(opened, environment, role)
    except BaseException:
        listener.close()
        raise
    here = f"{LOOPBACK}:{listener.getsockname()[1]}"

    def serve() -> int:
        def check() -> None:
            opened.check()
            connection.require_active()

        try:
            with connection, Forwarder(listener, lambda: connection.open_tcp(port), opened.progress.note) as forwarder:
                forwarder.wait(check)
        except KeyboardInterrupt as interrupt:
            return exit_code(interrupt)

    data = {"environment": environment.id, "machine": role, "port": port, "address": here}
    return Result(data, f"{here} is port {port} of the {role} machine of {environment.id}; Ctrl-C ends", then=serve)


def parse_ports(text: str) -> tuple[int, int | None]:
    """Parses PORT or PORT:LOCAL.

    Raises:
        UsageError: it is neither.
    """
    match = re.fullmatch(r"([0-9]{1,5})(?::([0-9]{1,5}))?", text, re.ASCII)
    numbers = [int(number) for number in match.groups() if number is not None] if match else []
    if not numbers or not all(1 <= number <= HIGHEST_PORT for number in numbers):
        raise UsageError(
            f"The ports must be PORT or PORT:LOCAL, each between 1 and {HIGHEST_PORT}, not {text!r}.",
            hint="8000:9000 brings the machine's port 8000 to this host's port 9000.",
        )
    return numbers[0], numbers[1] if len(numbers) > 1 else None
