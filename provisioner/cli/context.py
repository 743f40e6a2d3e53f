"""Makes every command alike: --json and --debug, one place for errors and signals, one way to a session."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from provisioner.cli.output import Result, TerminalProgress, render, render_error
from provisioner.destinations import parse_destination, resolve
from provisioner.errors import HostError, Interrupted, ProvisionerError
from provisioner.interrupts import Interrupts
from provisioner.models import Destination
from provisioner.paths import Home
from provisioner.registry import DEFAULT_CLOUD, open_cloud
from provisioner.session import Session
from provisioner.settings import load_settings
from provisioner.task_family import TaskFamily, load_family, refuse_env_file_inside
from provisioner.variables import load_env_file

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug logs.")]
FamilyArgument = Annotated[
    Path, typer.Argument(metavar="FAMILY", help="Directory of the task family.", show_default=False)
]
TaskArgument = Annotated[str, typer.Argument(metavar="TASK", help="Name of the task.", show_default=False)]


def environment_ids(incomplete: str) -> list[str]:
    """Ids for the shell's completion: whatever happens, it says nothing else."""
    with contextlib.suppress(OSError):
        return sorted(path.name for path in Home.default().environments.iterdir() if path.name.startswith(incomplete))
    return []


EnvironmentArgument = Annotated[
    str,
    typer.Argument(
        metavar="ENV", help="Id of the environment, or its beginning or end.", autocompletion=environment_ids
    ),
]
EnvFileOption = Annotated[
    Path | None, typer.Option("--env-file", help="File of NAME=value lines: the task's secrets.", show_default=False)
]
AllowOption = Annotated[
    list[str] | None,
    typer.Option("--allow", metavar="HOST:PORT", help="What an environment without internet may reach. Repeatable."),
]
CloudOption = Annotated[str, typer.Option("--cloud", help="Where machines run.")]

_progress = TerminalProgress()
_interrupts = Interrupts(_progress.note)


def family_session(family: Path, env_file: Path | None, cloud: str) -> tuple[Session, TaskFamily]:
    """The session of a command that works on a family, and the family; its secrets must lie outside it."""
    loaded = load_family(family)
    if env_file:
        refuse_env_file_inside(loaded, env_file)
    return session(env_file, cloud), loaded


def session(env_file: Path | None = None, cloud: str = DEFAULT_CLOUD) -> Session:
    """The session of one command."""
    home = Home.default()
    try:
        home.make()
    except OSError as error:
        raise HostError(
            f"The provisioner home {home.root} cannot be used: {error.strerror}.",
            hint="Set PROVISIONER_HOME to a directory of yours.",
        ) from error
    return Session(
        home=home,
        cloud=open_cloud(cloud, home, load_settings()),
        progress=_progress,
        variables=load_env_file(env_file) if env_file else {},
        shield=shield,
    )


def shield() -> AbstractContextManager[None]:
    """Keeps signals from cutting a clean-up short."""
    return _interrupts.shield()


def destinations(allow: list[str] | None) -> tuple[Destination, ...]:
    """The allowlist, checked and resolved."""
    return resolve([parse_destination(text) for text in allow or []])


def command(app: typer.Typer, name: str, **settings: Any) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Registers a function that returns a Result as a command, with --json and --debug.

    A function that streams output by itself takes a parameter `as_json`.

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
            raise typer.Exit(_run(lambda: function(**arguments), as_json=as_json, debug=debug))

        signature = inspect.signature(function, eval_str=True)
        wants_json = "as_json" in signature.parameters
        options = [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
            for option, annotation in (("json", JsonOption), ("debug", DebugOption))
        ]
        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in signature.parameters.items()
            if name != "as_json"
        ]
        wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*parameters, *options], return_annotation=None
        )
        app.command(name, **settings)(wrapper)
        return function

    return register


def _run(function: Callable[[], Result], *, as_json: bool, debug: bool) -> int:
    """Runs a command and renders what it came to; the only place that catches everything."""
    logging.basicConfig(level=logging.DEBUG if debug else logging.CRITICAL, stream=sys.stderr)
    _interrupts.install()
    try:
        result = function()
        _progress.stop()
        render(result, as_json=as_json)
        return result.exit_code
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        error: ProvisionerError = Interrupted("Interrupted.", hint="`provisioner list` shows what still exists.")
        return _fail(error, as_json=as_json, debug=debug)
    except ProvisionerError as error:
        return _fail(error, as_json=as_json, debug=debug)
    except (OSError, ValidationError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as problem:
        unexpected = ProvisionerError(
            f"Unexpected {type(problem).__name__}: {problem}",
            hint="This is a bug or a broken host; --debug shows where.",
        )
        return _fail(unexpected, as_json=as_json, debug=debug)


def _fail(error: ProvisionerError, *, as_json: bool, debug: bool) -> int:
    _progress.stop()
    if debug:
        traceback.print_exc()
    render_error(error, as_json=as_json)
    return error.exit_code
