"""The command line: parses, calls the library, prints. The only package that prints or exits."""

from __future__ import annotations

import typer

import provisioner.cli.environment_commands as environment_commands
import provisioner.cli.family_commands as family_commands
import provisioner.cli.image_commands as image_commands
import provisioner.cli.machine_commands as machine_commands

app = typer.Typer(
    name="provisioner",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Runs METR Task Standard tasks in isolated virtual machines, scores them and leaves nothing behind.\n\n"
    "Exit codes: 0 done; 1 other failure; 2 bad input, nothing created; 3 this host lacks something; "
    "4 an image could not be built; 5 infrastructure failed; 6 not isolated; 7 the family's own code failed; "
    "130 interrupted.",
)
for part in (family_commands, environment_commands, machine_commands, image_commands):
    part.register(app)


def main() -> int:
    """Runs the command line; returns the exit code."""
    try:
        app()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return 0
