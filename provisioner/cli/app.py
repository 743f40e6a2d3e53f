"""The program: its commands with their help, its own options, and its exit codes."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from provisioner.base.errors import HostError, ProvisionerError, UsageError
from provisioner.cli.lazy_commands import lazy_app
from provisioner.cli.output import prepare, silence, unwritable
from provisioner.version import __version__

PROGRAM = "provisioner"
# At the first TAB, zsh loads the script that Typer installs as a function and calls it. The script then only defines
# another function, so the first TAB would complete nothing.
_ZSH_FIRST_COMPLETION = f"""
if [[ $funcstack[1] == _{PROGRAM} ]]; then
  _{PROGRAM}_completion "$@"
fi
"""

COMMANDS = {
    "doctor": "Show what this machine lacks, and how to install it.",
    # Writing a family.
    "new": "Write a small family that works, to begin with.",
    "check": "Find a family's mistakes before anything is built.",
    "plan": "Show a task's machines and costs. Creates nothing.",
    "tasks": "List a family's tasks, from its image.",
    "dev": "Keep an environment up to date with a family's files. Runs until Ctrl-C.",
    "test": "Run the family's own pytest tests in an environment.",
    # Running it.
    "run": "Do a whole run: create, start, work, score, destroy.",
    "batch": "Run many tasks with many agents, many times.",
    # One step at a time.
    "up": "Bring an environment up, ready for an agent.",
    "agent": "Run an agent in the primary machine, as user agent. Copies its directory there first.",
    "exec": "Run a command in a machine. Exits with the command's exit code.",
    "ssh": "Open a shell in a machine, or bring a port of it here.",
    "cp": "Copy a file or directory to or from a machine. Write the machine's side as ENV:PATH.",
    "score": "Score an environment.",
    "destroy": "Destroy environments, until the cloud confirms it.",
    # Seeing what is there, and what came of it.
    "list": "List all live environments and image builders.",
    "show": "Show an environment's record, even after its end.",
    "logs": "Show an environment's logs, even after its end.",
    "replay": "Replay terminals, or show recorded calls.",
    "verify": "Check results and sealed logs, byte for byte.",
    "costs": "Show the reserved and actual costs of launches.",
    # Keeping order.
    "extend": "Extend an environment's time to live.",
    "sweep": "Remove orphans: environments whose command has ended. Also removes those past their time to live.",
    "image": "Machine images: build, list, prune.",
    "freeze": "Freeze a running environment, to copy it later.",
    "snapshot": "Frozen environments: list, remove.",
    "aws": "Set up an AWS account for provisioner.",
}
"""Name -> help, of which `provisioner --help` lists the first sentence. Each has a module of its name in commands/."""


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
    "provisioner.cli.commands",
    COMMANDS,
    callback=_options,
    name=PROGRAM,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Runs METR Task Standard tasks in isolated virtual machines, scores them and leaves nothing behind.\n\n"
    "Exit codes: 0 done; 1 other failure; 2 bad input, no environment created (an image may have been built); "
    "3 this host lacks something; 4 an image could not be built; 5 infrastructure failed; 6 not isolated; "
    "7 the family's own code failed; 8 over budget; 130 interrupted (SIGTERM: 143, SIGHUP: 129).",
)


def _hint(unknown: str, context: typer.Context) -> str:
    """Says what to do about arguments that no command takes, such as an unknown option."""
    if unknown in ("--json", "--debug") and not context.parent:
        return f"{unknown} comes after the command, as in `{PROGRAM} list {unknown}`."
    if unknown and context.info_name == "exec" and "--" not in sys.argv:
        return f"Write -- before what is to run: `{context.command_path} ENV -- ls -l`."
    return f"`{context.command_path} --help` shows what it takes."


def main() -> int:
    """Runs the command line; returns the exit code."""
    # What commands write holds keys, states and logs, and is for the operator alone.
    os.umask(0o077)
    prepare()
    as_json = "--json" in itertools.takewhile(lambda argument: argument != "--", sys.argv[1:])
    try:
        code = app(prog_name=PROGRAM, standalone_mode=False)
    except SystemExit:  # Typer's options for completion end the program
        if "--install-completion" in sys.argv:
            _correct_zsh_completion()
        raise
    except typer.TyperException as wrong:
        context = getattr(wrong, "ctx", None)
        if context and wrong.message == context.get_help():  # a group without a command
            print(wrong.message, file=sys.stderr)
            return wrong.exit_code
        # Arguments that no command takes look like every other error, under --json too.
        unknown = getattr(wrong, "option_name", "") if wrong.message.startswith("No such option") else ""
        hint = _hint(unknown, context) if context else None
        message = wrong.format_message().replace("Value error, ", "", 1)  # pydantic's, which Typer passes on
        _render_error(UsageError(message, hint=hint), as_json=as_json)
        return UsageError.exit_code
    except ProvisionerError as error:  # a command's module cannot be imported; commands show errors themselves
        _render_error(error, as_json=as_json)
        return error.exit_code
    except OSError as error:  # commands handle their own: this is the help, the version, or an error under --json
        silence(sys.stdout)
        _render_error(unwritable(error), as_json=False)
        return HostError.exit_code
    return code if isinstance(code, int) else 0


def _correct_zsh_completion() -> None:
    """Extends the zsh script that Typer has installed, so that the first TAB of each shell completes something."""
    script = Path.home() / ".zfunc" / f"_{PROGRAM}"
    if script.exists() and not (text := script.read_text()).endswith(_ZSH_FIRST_COMPLETION):
        script.write_text(text + _ZSH_FIRST_COMPLETION)


def _render_error(error: ProvisionerError, *, as_json: bool) -> None:
    from provisioner.cli.terminal import render_error  # rich takes long to import, and most commands have no error

    render_error(error, as_json=as_json)
