"""Defines the arguments and options that several commands share, and parses them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import typer

from provisioner.base.clock import DEFAULT_TTL, checked_ttl, parse_duration
from provisioner.base.errors import UsageError
from provisioner.base.models import Environment, Role
from provisioner.cli.completion import all_environment_ids, environment_ids
from provisioner.clouds.registry import CLOUDS, DEFAULT_CLOUD, Where


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


FAMILY = typer.Argument(metavar="FAMILY", help="Directory of the task family.", parser=parse_path)
TASK = typer.Argument(metavar="TASK", help="Name of the task.", parser=parse_task_name)
FamilyArgument = Annotated[Path, FAMILY]
TaskArgument = Annotated[str, TASK]
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
    typer.Option("--env-file", metavar="FILE", help="File of NAME=value lines: the task's secrets.", parser=parse_path),
]
AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow", metavar="HOST:PORT", help="Destination that an environment without internet may reach; repeatable."
    ),
]
KeepOption = Annotated[
    bool, typer.Option("--keep", help="Keep the environment up if it fails; with `run` and `test`, always.")
]
NoTemplateOption = Annotated[
    bool, typer.Option("--no-template", help="Boot local machines instead of starting them from a template.")
]
NoRecordOption = Annotated[bool, typer.Option("--no-record", help="Record no calls, no terminals and no packets.")]
MachineOption = Annotated[
    str,
    typer.Option("--machine", metavar="NAME", help="Which machine: primary, aux, or its host name."),
]
# None: agent on the primary machine, admin on the aux VM, or ubuntu if it is an Ubuntu.
UserOption = Annotated[
    Literal["agent", "root", "admin", "ubuntu"] | None,
    typer.Option("--user", help="User in the machine.", show_default="agent; aux: admin, ubuntu if it is an Ubuntu"),
]
# As text it would show in the host's process list, which every user of the host may read.
SubmissionOption = Annotated[
    str | None,
    typer.Option(
        "--submission", metavar="-", help="Score standard input instead of the submission file.", parser=parse_text
    ),
]
SubmissionFileOption = Annotated[
    Path | None,
    typer.Option(
        "--submission-file",
        metavar="FILE",
        help="File on this host to score instead of the submission file.",
        parser=parse_path,
    ),
]


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


def _launch(
    ttl: Annotated[
        str | None, typer.Option("--ttl", metavar="TIME", help="Time to live, such as 30m. Default: 4h.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", metavar="USD", help="Most that this command may cost; traffic is noticed minutes late."
        ),
    ] = None,
) -> Launch:
    return Launch(ttl, budget)


def _where(
    cloud: Annotated[str, typer.Option("--cloud", help=f"Where machines run: {' or '.join(CLOUDS)}.")] = DEFAULT_CLOUD,
    region: Annotated[
        list[str] | None,
        typer.Option(
            "--region",
            help="AWS region; repeatable: the others are tried if the first lacks capacity.",
            parser=parse_region,
        ),
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Try AWS spot instances first.")] = False,
) -> Where:
    return Where(cloud, tuple(region or ()), spot=spot)


OPTION_SETS: dict[str, Callable[..., Launch | Where]] = {"launch": _launch, "where": _where}
"""By the parameter with which a command asks for them: what makes its value from options, which are its parameters."""


def output_options(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug logs.")] = False,
) -> None:
    """Declares the options of every command, as its parameters. Does nothing."""


def checked_database(url: str) -> str:
    """Checks a database's URL and returns it.

    Raises:
        UsageError: it is not the URL of a Postgres database.
    """
    if url and not url.startswith(("postgresql://", "postgres://")):
        raise UsageError(f"The database's URL must begin with postgresql:// ({DATABASE_VARIABLE}, or --database).")
    return url


def machine_and_user(environment: Environment, name: str, user: str | None) -> tuple[Role, str]:
    """Returns the role of a machine, and its user.

    Raises:
        UsageError: there is none, or it has no such user.
    """
    role = environment.role_of(name)
    if role is None:
        names = ", ".join(environment.hostname(role) for role in environment.roles)
        raise UsageError(f"{environment.id} has no machine {name}.", hint=f"It has: {names}.")
    users = ("agent", "root")
    if role == "aux":
        from provisioner.machines.create import aux_user  # takes long to import, and only this needs it

        users = (aux_user(environment.machines[role].distribution), "root")
    chosen = user or users[0]
    if chosen not in users:
        raise UsageError(f"The {role} machine has no user {chosen}.")
    return role, chosen


def read_submission(source: str | None, file: Path | None) -> str | None:
    """Returns the submission that the options name; None if they name none.

    Args:
        source: the value of --submission.
        file: that of --submission-file.

    Raises:
        UsageError: both name one, --submission names anything but standard input, or it cannot be read, is too long,
            or is not UTF-8.
    """
    if source is not None and file is not None:
        raise UsageError("Use either --submission or --submission-file.")
    if source == "-":
        return _read(sys.stdin.buffer, "standard input")
    if source is not None:
        raise UsageError(
            "The submission cannot be an argument: every user of this host could read it in the process list.",
            hint="Use --submission-file FILE, or --submission - for standard input.",
        )
    if file is None:
        return None
    try:
        with file.open("rb") as opened:
            return _read(opened, str(file))
    except OSError as error:
        raise UsageError(f"The submission {file} cannot be read: {error.strerror}.") from error


def _read(source: BinaryIO, name: str) -> str:
    from provisioner.environment.operations import SUBMISSION_LIMIT_BYTES  # takes long to import

    data = source.read(SUBMISSION_LIMIT_BYTES + 1)
    if len(data) > SUBMISSION_LIMIT_BYTES:
        raise UsageError(f"The submission in {name} is longer than {SUBMISSION_LIMIT_BYTES >> 20} MiB.")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"The submission in {name} is not UTF-8.") from error
