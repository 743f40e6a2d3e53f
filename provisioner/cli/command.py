"""Gives every command --json and --debug, and the same handling of errors and signals."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import logging
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import typer

from provisioner.base.errors import Interrupted, ProvisionerError, UsageError
from provisioner.base.printable import beginning, printable_lines
from provisioner.base.signals import Interrupts, exit_code
from provisioner.cli.options import LAUNCH_OPTIONS, WHERE_OPTIONS, DebugOption, JsonOption, Launch
from provisioner.cli.output import Result, render
from provisioner.cli.streams import stderr
from provisioner.clouds.registry import Where
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


def command(app: typer.Typer, name: str, **settings: Any) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Registers a function that returns a Result as a command, with --json and --debug.

    The function's parameters select further options: `as_json` if it streams output itself, `where` if it uses a
    cloud, and `launch` if it creates machines.

    Args:
        app: the Typer application.
        name: the command's name.
        settings: passed to Typer.
    """

    def register(function: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(function)
        def wrapper(**arguments: Any) -> None:
            as_json, debug = arguments.pop("json"), arguments.pop("debug")
            if wants_json:
                arguments["as_json"] = as_json
            if wants_where:
                places = {option: arguments.pop(option) for option in WHERE_OPTIONS}
                regions = tuple(places["region"] or ())
                arguments["where"] = Where(places["cloud"], regions, places["profile"], places["spot"], places["state"])
            if wants_launch:
                arguments["launch"] = Launch(**{option: arguments.pop(option) for option in LAUNCH_OPTIONS})
            try:
                code = _run(lambda: function(**arguments), as_json=as_json, debug=debug)
            except KeyboardInterrupt as another:  # while an error was shown; Typer takes each for a Ctrl-C
                code = exit_code(another)
            raise typer.Exit(code)

        signature = inspect.signature(function, eval_str=True)
        wants_json, wants_where = "as_json" in signature.parameters, "where" in signature.parameters
        wants_launch = "launch" in signature.parameters
        options = [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for option, (annotation, default) in {
                **(LAUNCH_OPTIONS if wants_launch else {}),
                **(WHERE_OPTIONS if wants_where else {}),
                "json": (JsonOption, False),
                "debug": (DebugOption, False),
            }.items()
        ]
        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in signature.parameters.items()
            if name not in ("as_json", "where", "launch")
        ]
        wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*parameters, *options], return_annotation=None
        )
        app.command(name, **settings)(wrapper)
        return function

    return register


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
        as_json = False  # its one object has been printed
        if result.then is None:
            return result.exit_code
        try:
            return result.then()
        finally:
            _stop_progress()
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
