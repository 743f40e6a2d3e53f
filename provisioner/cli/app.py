"""The program: its commands with their lines in the help, its own options, and its exit codes."""

from __future__ import annotations

import itertools
import os
import sys
from typing import Annotated

import typer
from typer import _completion_shared as shared  # Typer has no other way to change a script

# Typer carries its own click, and exports only some of its exceptions.
from typer._click.exceptions import ClickException, NoArgsIsHelpError

from provisioner.cli.lazy_commands import lazy_app
from provisioner.cli.output import unwritable
from provisioner.cli.streams import prepare, silence
from provisioner.errors import HostError, ProvisionerError, UsageError
from provisioner.version import __version__

PROGRAM = "provisioner"
# At the first TAB, zsh loads this script as a function and calls it. Typer's script then only defines another function,
# so the first TAB would complete nothing.
_WHEN_ZSH_LOADS_IT = """
if [[ $funcstack[1] == _%(prog_name)s ]]; then
  %(complete_func)s "$@"
fi
"""

COMMANDS = {
    "provisioner.cli.commands.tasks": {
        "tasks": "List a family's tasks, from its image.",
    },
    "provisioner.cli.commands.check": {
        "new": "Write a small family that works, to begin with.",
        "check": "Find a family's mistakes before anything is built.",
    },
    "provisioner.cli.commands.doctor": {"doctor": "Show what this machine lacks, and how to install it."},
    "provisioner.cli.commands.environments": {
        "run": "Do a whole run: create, start, agent or submission, score, destroy.",
        "up": "Bring an environment up, ready for an agent.",
        "score": "Score an environment.",
        "test": "Run the family's own pytest tests in an environment.",
        "destroy": "Destroy environments, until the cloud confirms that they are gone.",
    },
    "provisioner.cli.commands.dev": {"dev": "Keep an environment up to date with the family's files, until Ctrl-C."},
    "provisioner.cli.commands.logs": {"logs": "Show an environment's logs, even after its end."},
    "provisioner.cli.commands.recordings": {
        "replay": "Replay an environment's recorded terminals, or show its calls and its network.",
        "verify": "Check sealed logs, and results that carry their hashes, byte for byte.",
    },
    "provisioner.cli.commands.records": {
        "list": "List all live environments and image builders.",
        "show": "Show an environment's record, even after its end.",
    },
    "provisioner.cli.commands.ttl": {
        "extend": "Extend an environment's time to live.",
        "sweep": "Remove orphans: environments whose command has died, or whose time to live is over.",
    },
    "provisioner.cli.commands.costs": {
        "plan": "Show the machines and the cost of a task's environment. Creates nothing.",
        "costs": "Show the reserved and actual costs of launches.",
    },
    "provisioner.cli.commands.machines": {
        "exec": "Run a command in a machine and end with its exit code.",
        "ssh": "Open a shell in a machine.",
        "cp": "Copy a file or directory; write ENV:PATH for the machine's side.",
        "agent": "Copy an agent into the primary machine and run it there as user agent.",
    },
    "provisioner.cli.commands.forward": {"forward": "Forward a machine's port to this host's loopback, until Ctrl-C."},
    "provisioner.cli.commands.snapshots": {
        "freeze": "Freeze a running environment, to bring up copies of it later.",
        "snapshot": "Frozen environments: list, remove.",
    },
    "provisioner.cli.commands.images": {"image": "Machine images: build, list, prune."},
    "provisioner.cli.commands.batch.group": {"batch": "Run many tasks with many agents, many times."},
    "provisioner.cli.commands.aws": {"aws": "Set up an AWS account for provisioner."},
}
"""Module -> its commands, each with its line in the help. Imported when used, so that short commands start at once."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(PROGRAM, __version__, flush=True)
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Takes the program's own options."""


app = lazy_app(
    COMMANDS,
    callback=_options,
    name=PROGRAM,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Runs METR Task Standard tasks in isolated virtual machines, scores them and leaves nothing behind.\n\n"
    "Exit codes: 0 done; 1 other failure; 2 bad input, nothing created; 3 this host lacks something; "
    "4 an image could not be built; 5 infrastructure failed; 6 not isolated; 7 the family's own code failed; "
    "8 over budget; 130 interrupted (SIGTERM: 143).",
)


def main() -> int:
    """Runs the command line; returns the exit code."""
    # What commands write holds keys, states and logs, and is for the operator alone.
    os.umask(0o077)
    prepare()
    _correct_zsh_completion()
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
        _render_error(UsageError(wrong.format_message(), hint=hint), as_json="--json" in before_dashes)
        return UsageError.exit_code
    except OSError as error:  # commands handle their own: this is the help, the version, or an error under --json
        silence(sys.stdout)
        _render_error(unwritable(error), as_json=False)
        return HostError.exit_code
    return code if isinstance(code, int) else 0


def _correct_zsh_completion() -> None:
    """Has Typer install and show a script for zsh whose first TAB in each shell completes something."""
    scripts = shared._completion_scripts
    if not scripts["zsh"].endswith(_WHEN_ZSH_LOADS_IT):
        scripts["zsh"] += _WHEN_ZSH_LOADS_IT


def _render_error(error: ProvisionerError, *, as_json: bool) -> None:
    from provisioner.cli.terminal import render_error  # rich takes long to import, and most commands have no error

    render_error(error, as_json=as_json)
