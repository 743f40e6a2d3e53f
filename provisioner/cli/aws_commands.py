"""aws policy."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from provisioner.cli.context import command
from provisioner.cli.output import Result
from provisioner.settings import checked, load_settings


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    group = typer.Typer(no_args_is_help=True, help="What the aws cloud needs of an account.", rich_markup_mode=None)
    app.add_typer(group, name="aws")
    command(group, "policy", help="Print the IAM policy with the rights that provisioner needs, and no more.")(policy)


def policy(
    state: Annotated[
        str | None,
        typer.Option("--state", metavar="s3://BUCKET/PREFIX", help="Terraform's state in S3.", show_default=False),
    ] = None,
) -> Result:
    """The policy, as IAM takes it."""
    from provisioner.clouds.aws.policy import policy as rights  # boto3 takes its time, and only this needs it

    settings = load_settings() if state is None else checked(state=state)
    document = rights(settings.state)
    return Result(document, json.dumps(document, indent=2))
