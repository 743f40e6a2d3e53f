"""Defines the arguments and options that several commands share, and parses them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any

import typer

from provisioner.base.clock import DEFAULT_TTL, checked_ttl, parse_duration
from provisioner.base.errors import UsageError
from provisioner.cli.completion import all_environment_ids, cloud_names, environment_ids, task_names
from provisioner.clouds.registry import CLOUDS, DEFAULT_CLOUD

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug logs.")]


def parse_path(text: str) -> Path:
    """Parses a path argument. Refuses an empty text, which Path would turn into the current directory."""
    if not text:
        raise typer.BadParameter("a path must not be empty.")
    return Path(text)


def parse_text(text: str) -> str:
    """Parses text for a machine. Refuses bytes that are not UTF-8, which could not be sent."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise typer.BadParameter("the text must be UTF-8.")
    return text


def parse_region(text: str) -> str:
    """Parses the name of one region."""
    if not text.strip() or "," in text:
        raise typer.BadParameter("give the name of one region; where several may be given, the option is repeated.")
    return text


def parse_profile(text: str) -> str:
    """Parses the name of a profile, which must not be empty."""
    if not text.strip():
        raise typer.BadParameter("a profile must not be empty; without --profile, the settings' is used.")
    return text


def parse_task_name(text: str) -> str:
    """Parses the name of a task, which must not be empty."""
    if not text:
        raise typer.BadParameter("a task's name must not be empty.")
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


TaskArgument = Annotated[
    str,
    typer.Argument(
        metavar="TASK",
        help="Name of the task.",
        show_default=False,
        parser=parse_task_name,
        autocompletion=task_names,
    ),
]


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


KeepOption = Annotated[
    bool,
    typer.Option("--keep", help="Keep the environment up if it fails; with `run` and `test`, always."),
]


NoTemplateOption = Annotated[
    bool, typer.Option("--no-template", help="Boot local machines instead of starting them from a template.")
]


NoRecordOption = Annotated[bool, typer.Option("--no-record", help="Record no calls, no terminals and no packets.")]


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


ProfileOption = Annotated[
    str | None,
    typer.Option("--profile", help="Profile of the AWS configuration.", show_default=False, parser=parse_profile),
]
WHERE_OPTIONS: dict[str, tuple[Any, Any]] = {
    "cloud": (
        Annotated[
            str,
            typer.Option("--cloud", help=f"Where machines run: {' or '.join(CLOUDS)}.", autocompletion=cloud_names),
        ],
        DEFAULT_CLOUD,
    ),
    "region": (
        Annotated[
            list[str] | None,
            typer.Option(
                "--region",
                help="AWS region; repeatable: the others are tried if the first lacks capacity.",
                parser=parse_region,
            ),
        ],
        None,
    ),
    "profile": (
        ProfileOption,
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


@dataclass(frozen=True)
class Launch:
    """Holds the time to live and the budget of a command's launches; None stands for the default.

    Args:
        templates: whether machines may start from templates.
        record: whether calls, terminals and packets are recorded.
    """

    ttl: str | None = None
    budget: str | None = None
    templates: bool = True
    record: bool = True

    @property
    def time_to_live(self) -> timedelta:
        """Returns the time to live.

        Raises:
            UsageError: the text is not a duration, or the duration is too short or too long.
        """
        return DEFAULT_TTL if self.ttl is None else checked_ttl(parse_duration(self.ttl))

    @property
    def usd(self) -> Decimal | None:
        """Returns the budget in US dollars.

        Raises:
            UsageError: the text is not an amount.
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


def checked_database(url: str) -> str:
    """Checks a database's URL and returns it.

    Raises:
        UsageError: it is not the URL of a Postgres database.
    """
    if url and not url.startswith(("postgresql://", "postgres://")):
        raise UsageError(f"The database's URL must begin with postgresql:// ({DATABASE_VARIABLE}, or --database).")
    return url
