"""The command line: parses, calls the library, prints. The only package that prints or exits."""

from __future__ import annotations

import itertools
import sys

import typer

# Typer carries its own click, and exports only some of its exceptions.
from typer._click.exceptions import ClickException, NoArgsIsHelpError

import provisioner.cli.aws_commands as aws_commands
import provisioner.cli.cost_commands as cost_commands
import provisioner.cli.environment_commands as environment_commands
import provisioner.cli.family_commands as family_commands
import provisioner.cli.image_commands as image_commands
import provisioner.cli.limit_commands as limit_commands
import provisioner.cli.machine_commands as machine_commands
from provisioner.cli.lazy_group import add_lazy_group
from provisioner.cli.output import render_error, unwritable
from provisioner.cli.streams import prepare, silence
from provisioner.errors import HostError, UsageError

PROGRAM = "provisioner"

app = typer.Typer(
    name=PROGRAM,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Runs METR Task Standard tasks in isolated virtual machines, scores them and leaves nothing behind.\n\n"
    "Exit codes: 0 done; 1 other failure; 2 bad input, nothing created; 3 this host lacks something; "
    "4 an image could not be built; 5 infrastructure failed; 6 not isolated; 7 the family's own code failed; "
    "8 over budget; 130 interrupted.",
)
for part in (
    family_commands,
    environment_commands,
    limit_commands,
    cost_commands,
    machine_commands,
    image_commands,
):
    part.register(app)
# The batch engine takes a second to import.
add_lazy_group(app, "batch", "provisioner.cli.batch_commands", help="Run many tasks with many agents, many times.")
aws_commands.register(app)


def main() -> int:
    """Runs the command line; returns the exit code."""
    prepare()
    try:
        code = app(prog_name=PROGRAM, standalone_mode=False)
    except NoArgsIsHelpError as help_wanted:
        help_wanted.show()
        return help_wanted.exit_code
    except ClickException as wrong:
        # Arguments that no command takes look like every other error, under --json too.
        context = getattr(wrong, "ctx", None)
        hint = f"`{context.command_path} --help` shows what it takes." if context else None
        before_dashes = itertools.takewhile(lambda argument: argument != "--", sys.argv[1:])
        render_error(UsageError(wrong.format_message(), hint=hint), as_json="--json" in before_dashes)
        return UsageError.exit_code
    except OSError as error:  # commands handle their own: this is the help, or an error under --json
        silence(sys.stdout)
        render_error(unwritable(error), as_json=False)
        return HostError.exit_code
    return code if isinstance(code, int) else 0
