"""Gives all commands the same options, the same handling of errors and signals, and the same way to a session."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any

import typer

from provisioner.cli.output import Result, TerminalProgress, render, render_error
from provisioner.cli.streams import stderr
from provisioner.clouds.registry import CLOUDS, DEFAULT_CLOUD, Where, open_cloud
from provisioner.config import load_settings
from provisioner.costs.budgets import Spending
from provisioner.environment.allowlist import parse_destination, resolve
from provisioner.errors import HostError, Interrupted, ProvisionerError, UsageError
from provisioner.family.env_file import load_env_file
from provisioner.family.loader import TaskFamily, load_family, refuse_env_file_inside
from provisioner.models import Destination, Environment
from provisioner.session import Session
from provisioner.signals import Interrupts
from provisioner.store.home import Home
from provisioner.ttl import DEFAULT_TTL, checked_ttl, parse_duration

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug logs.")]


def parse_path(text: str) -> Path:
    """Parses a path argument. Refuses an empty one, which Path would turn into the current directory."""
    if not text:
        raise typer.BadParameter("a path must not be empty.")
    return Path(text)


def parse_text(text: str) -> str:
    """Parses text that goes into a machine. Refuses bytes that are not UTF-8, which could not be sent."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise typer.BadParameter("the text must be UTF-8.")
    return text


def parse_database(text: str) -> str:
    """Parses the URL of a database that workers share."""
    try:
        return checked_database(text)
    except UsageError as error:
        raise typer.BadParameter(error.message) from error


FamilyArgument = Annotated[
    Path,
    typer.Argument(metavar="FAMILY", help="Directory of the task family.", show_default=False, parser=parse_path),
]
TaskArgument = Annotated[str, typer.Argument(metavar="TASK", help="Name of the task.", show_default=False)]


def environment_ids(incomplete: str) -> list[str]:
    """Returns ids for the shell's completion. Prints nothing else, even after an error."""
    with contextlib.suppress(OSError, RuntimeError):
        return _ids(Home.default().environments, incomplete)
    return []


def all_environment_ids(incomplete: str) -> list[str]:
    """Returns ids for the shell's completion, including those of destroyed environments."""
    with contextlib.suppress(OSError, RuntimeError):
        return sorted({*environment_ids(incomplete), *_ids(Home.default().archive, incomplete)})
    return []


def _ids(directory: Path, incomplete: str) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir() and path.name.startswith(incomplete))


DATABASE_VARIABLE = "PROVISIONER_DATABASE"
ENVIRONMENT_HELP = "Id of the environment, or its beginning or end."
EnvironmentArgument = Annotated[
    str, typer.Argument(metavar="ENV", help=ENVIRONMENT_HELP, autocompletion=environment_ids)
]
PastEnvironmentArgument = Annotated[
    str, typer.Argument(metavar="ENV", help=ENVIRONMENT_HELP, autocompletion=all_environment_ids)
]
EnvFileOption = Annotated[
    Path | None,
    typer.Option(
        "--env-file",
        metavar="FILE",
        help="File of NAME=value lines: the task's secrets.",
        show_default=False,
        parser=parse_path,
    ),
]
AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow", metavar="HOST:PORT", help="Destination that an environment without internet may reach; repeatable."
    ),
]
LAUNCH_OPTIONS: dict[str, tuple[Any, Any]] = {
    "ttl": (
        Annotated[str | None, typer.Option("--ttl", metavar="TIME", help="Time to live, such as 30m. Default: 4h.")],
        None,
    ),
    "budget": (
        Annotated[
            str | None,
            typer.Option("--budget", metavar="USD", help="Most that this command may cost.", show_default=False),
        ],
        None,
    ),
}
WHERE_OPTIONS: dict[str, tuple[Any, Any]] = {
    "cloud": (
        Annotated[str, typer.Option("--cloud", help=f"Where machines run: {' or '.join(CLOUDS)}.")],
        DEFAULT_CLOUD,
    ),
    "region": (
        Annotated[
            list[str] | None,
            typer.Option("--region", help="AWS region; repeatable: the others are tried if the first lacks capacity."),
        ],
        None,
    ),
    "profile": (
        Annotated[str | None, typer.Option("--profile", help="Profile of the AWS configuration.", show_default=False)],
        None,
    ),
    "spot": (Annotated[bool, typer.Option("--spot", help="Try AWS spot instances first.")], False),
    "state": (
        Annotated[
            str | None,
            typer.Option("--state", metavar="s3://BUCKET/PREFIX", help="Terraform's state in S3.", show_default=False),
        ],
        None,
    ),
}

_progress = TerminalProgress()
_interrupts = Interrupts(_progress.note)


@dataclass(frozen=True)
class Launch:
    """The time to live and the budget of a command's launches; None for the defaults."""

    ttl: str | None = None
    budget: str | None = None

    @property
    def time_to_live(self) -> timedelta:
        """The time to live.

        Raises:
            UsageError: it is not a duration, or is too short or too long.
        """
        return DEFAULT_TTL if self.ttl is None else checked_ttl(parse_duration(self.ttl))

    @property
    def usd(self) -> Decimal | None:
        """The budget in US dollars.

        Raises:
            UsageError: it is not an amount.
        """
        if self.budget is None:
            return None
        try:
            amount = Decimal(self.budget)
        except InvalidOperation:
            amount = Decimal(-1)
        if not amount.is_finite() or amount < 0:
            raise UsageError(
                f"--budget must be an amount of US dollars, not {self.budget!r}.", hint="Write it as 20 or 0.50."
            )
        return amount


def family_session(
    family: Path, env_file: Path | None, where: Where, launch: Launch | None = None
) -> tuple[Session, TaskFamily]:
    """Opens a session for a command that works on a family, and loads the family. The env file must lie outside it."""
    loaded = load_family(family)
    if env_file:
        refuse_env_file_inside(loaded, env_file)
    return session(env_file, where, launch), loaded


def builder_session(family: Path, env_file: Path | None, where: Where, launch: Launch) -> tuple[Session, TaskFamily]:
    """Does the same for a command that only builds images: its time to live applies to the builders."""
    opened, loaded = family_session(family, env_file, where, launch)
    return replace(opened, builder_ttl=opened.ttl), loaded


def session(
    env_file: Path | None = None, where: Where | None = None, launch: Launch | None = None, database: str = ""
) -> Session:
    """Opens the session of a command."""
    launch = launch or Launch()
    ttl, budget = launch.time_to_live, launch.usd
    home, settings = default_home(), load_settings()
    return Session(
        home=home,
        cloud=open_cloud(home, settings, where or Where()),
        progress=_progress,
        variables=load_env_file(env_file) if env_file else {},
        shield=shield,
        ca_bundle=settings.ca_bundle_path,
        ttl=ttl,
        spending=Spending.of(settings, budget),
        database=database,
    )


def session_of(environment: Environment, opened: Session) -> Session:
    """Returns the session on an environment's cloud, with the ledger of its reservation if that is configured."""
    if environment.shared_ledger and not opened.database:
        opened = replace(opened, database=shared_database())
    where = Where.of(environment.cloud, environment.placement)
    return replace(opened, cloud=open_cloud(opened.home, load_settings(), where))


def shared_database() -> str:
    """Returns the URL of the database that workers share, or an empty string if none is configured.

    Raises:
        UsageError: it is not the URL of a Postgres database.
    """
    return checked_database(os.environ.get(DATABASE_VARIABLE, ""))


def checked_database(url: str) -> str:
    """Checks a database's URL and returns it.

    Raises:
        UsageError: it is not the URL of a Postgres database.
    """
    if url and not url.startswith(("postgresql://", "postgres://")):
        raise UsageError(f"The database's URL must begin with postgresql:// ({DATABASE_VARIABLE}, or --database).")
    return url


def environment_session(name: str, env_file: Path | None = None) -> tuple[Session, Environment]:
    """Finds the environment with a name and opens a session on its cloud."""
    opened = session(env_file)
    environment = opened.environments.find(name)
    return session_of(environment, opened), environment


def progress() -> TerminalProgress:
    """Returns the listener that shows progress on the terminal."""
    return _progress


def default_home() -> Home:
    """Returns the provisioner home and creates it if it does not exist.

    Raises:
        HostError: the home cannot be found or used.
    """
    hint = "Set PROVISIONER_HOME to a directory that you may write to."
    try:
        home = Home.default()
        home.make()
    except RuntimeError as error:  # ~name for a user that does not exist
        raise HostError("The provisioner home cannot be found: its user does not exist.", hint=hint) from error
    except OSError as error:
        raise HostError(f"The provisioner home {home.root} cannot be used: {error.strerror}.", hint=hint) from error
    return home


def shield() -> AbstractContextManager[None]:
    """Returns a context in which signals do not interrupt a clean-up."""
    return _interrupts.shield()


def destinations(allow: list[str] | None) -> tuple[Destination, ...]:
    """Checks and resolves the allowlist."""
    return resolve([parse_destination(text) for text in allow or []])


def command(app: typer.Typer, name: str, **settings: Any) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Registers a function that returns a Result as a command, with --json and --debug.

    Its parameters select further options: `as_json` for a function that streams output itself, `where` for one that
    uses a cloud, and `launch` for one that creates machines.

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
            raise typer.Exit(_run(lambda: function(**arguments), as_json=as_json, debug=debug))

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


def _run(function: Callable[[], Result], *, as_json: bool, debug: bool) -> int:
    """Runs a command and renders its result or error. The only place that catches all exceptions."""
    logging.basicConfig(level=logging.DEBUG if debug else logging.CRITICAL, stream=sys.stderr)
    for chatty in ("botocore", "urllib3"):  # they log whole answers of the cloud, many a second
        logging.getLogger(chatty).setLevel(logging.WARNING if debug else logging.CRITICAL)
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
    except Exception as problem:
        unexpected = ProvisionerError(
            f"Unexpected {type(problem).__name__}: {problem}",
            hint="This is a bug or a problem of this host; --debug shows a traceback.",
        )
        return _fail(unexpected, as_json=as_json, debug=debug)


def _fail(error: ProvisionerError, *, as_json: bool, debug: bool) -> int:
    _progress.stop()
    if debug:
        traceback.print_exc(file=stderr())
    render_error(error, as_json=as_json)
    return error.exit_code
