"""Gives every command --json and --debug, and the same handling of errors and signals."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Container
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import typer

from provisioner.base.errors import HostError, Interrupted, ProvisionerError, UsageError
from provisioner.base.printable import beginning, printable_lines
from provisioner.base.signals import Interrupts, exit_code
from provisioner.cli.options import OPTION_SETS, output_options
from provisioner.cli.output import Result, render, stderr
from provisioner.store.home import Home

if TYPE_CHECKING:
    from provisioner.cli.terminal import TerminalProgress


@functools.cache
def progress() -> TerminalProgress:
    """Returns the listener that shows progress on the terminal."""
    from provisioner.cli.terminal import TerminalProgress  # rich takes long to import; short commands show no progress

    return TerminalProgress()


def _stop_progress() -> None:
    if progress.cache_info().currsize:
        progress().stop()


_interrupts = Interrupts(lambda text: progress().note(text))


def shield() -> AbstractContextManager[None]:
    """Returns a context in which signals do not interrupt a clean-up."""
    return _interrupts.shield()


def register(app: typer.Typer, name: str, module: str) -> None:
    """Adds a command or a group to an application.

    Args:
        module: the module with the command's function `main`; of a group, with its COMMANDS: names -> functions and
            help.
    """
    imported = importlib.import_module(module)
    if not hasattr(imported, "COMMANDS"):
        add_command(app, name, imported.main)
        return
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    for command, (function, line) in imported.COMMANDS.items():
        add_command(group, command, function, line)
    app.add_typer(group, name=name)


def add_command(app: typer.Typer, name: str, function: Callable[..., Result], line: str | None = None) -> None:
    """Adds a function that returns a Result as a command, with --json and --debug.

    The function's parameters select further options: `as_json` if it streams output itself, `where` if it uses a
    cloud, and `launch` if it creates machines.

    Args:
        line: the command's help.
    """
    signature = inspect.signature(function, eval_str=True)
    option_sets = {name: make for name, make in OPTION_SETS.items() if name in signature.parameters}

    @functools.wraps(function)
    def wrapper(**arguments: Any) -> None:
        as_json, debug = arguments.pop("json"), arguments.pop("debug")
        if "as_json" in signature.parameters:
            arguments["as_json"] = as_json
        for name, from_options in option_sets.items():
            options = {option: arguments.pop(option) for option in inspect.signature(from_options).parameters}
            arguments[name] = from_options(**options)
        try:
            code = _run(lambda: _with_own_options(function, arguments, taken), as_json=as_json, debug=debug)
        except KeyboardInterrupt as another:  # while an error was shown; Typer takes each for a Ctrl-C
            code = exit_code(another)
        raise typer.Exit(code)

    parameters = [each for name, each in signature.parameters.items() if name not in ("as_json", *option_sets)]
    makers: list[Callable[..., object]] = [*option_sets.values(), output_options]
    for make in makers:
        parameters += inspect.signature(make, eval_str=True).parameters.values()
    named = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    taken = {each.name for each in named}
    wrapper.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    app.command(name, help=line)(wrapper)


def _with_own_options(function: Callable[..., Result], arguments: dict[str, Any], taken: Container[str]) -> Result:
    """Runs a command. An error names none of the settings that the command takes no option for."""
    try:
        return function(**arguments)
    except ProvisionerError as error:
        error.settings = tuple(setting for setting in error.settings if setting in taken)
        raise


class _PrintableFormatter(logging.Formatter):
    """Makes log lines printable, as libraries log what machines and clouds say."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record's lines."""
        return printable_lines(super().format(record))


def _run(function: Callable[[], Result], *, as_json: bool, debug: bool) -> int:
    """Runs a command and renders its result or error. The only place that catches all exceptions."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PrintableFormatter(logging.BASIC_FORMAT))
    logging.basicConfig(level=logging.DEBUG if debug else logging.CRITICAL, handlers=[handler])
    for chatty in ("botocore", "urllib3"):  # they log whole responses of the cloud, many per second
        logging.getLogger(chatty).setLevel(logging.WARNING if debug else logging.CRITICAL)
    _interrupts.install()
    try:
        result = function()
        _stop_progress()
        render(result, as_json=as_json)
        return result.exit_code
    except BrokenPipeError:
        return 1
    except ProvisionerError as error:
        return _fail(error, as_json=as_json, debug=debug)
    except KeyboardInterrupt as interrupt:
        interrupted = Interrupted("Interrupted.", hint=_what_still_exists())
        interrupted.exit_code = exit_code(interrupt)
        return _fail(interrupted, as_json=as_json, debug=debug)
    except Exception as problem:
        if isinstance(problem, OSError) and problem.errno == errno.ENAMETOOLONG and problem.filename:
            path = beginning(str(problem.filename2 or problem.filename), 200)
            return _fail(UsageError(f"This path, or a name in it, is too long: {path}"), as_json=as_json, debug=debug)
        unexpected = ProvisionerError(
            f"Unexpected {type(problem).__name__}: {problem}",
            hint="This is a bug or a problem of this host; --debug shows a traceback.",
        )
        return _fail(unexpected, as_json=as_json, debug=debug)


def _what_still_exists() -> str | None:
    """Returns the hint after an interruption: none if no environment or image builder exists."""
    with contextlib.suppress(OSError, RuntimeError):
        if not any(Home.default().environments.glob("*/")):
            return None
    return "`provisioner list` shows what still exists."


def _fail(error: ProvisionerError, *, as_json: bool, debug: bool) -> int:
    from provisioner.cli.terminal import render_error

    _stop_progress()
    if debug:
        stderr().write(f"{printable_lines(traceback.format_exc())}\n")
    render_error(error, as_json=as_json)
    return error.exit_code


def default_home() -> Home:
    """Returns the provisioner home and creates it if it does not exist.

    Raises:
        HostError: the home cannot be found or used.
    """
    hint = "Set PROVISIONER_HOME to a directory that you may write to."
    try:
        home = Home.default()
        if home.make():
            progress().note(f"Other users could enter the provisioner home {home.root}; its mode is now 0700.")
    except RuntimeError as error:  # ~name for a user that does not exist
        raise HostError("The provisioner home cannot be found: its user does not exist.", hint=hint) from error
    except OSError as error:
        raise HostError(f"The provisioner home {home.root} cannot be used: {error.strerror}.", hint=hint) from error
    return home
