"""The commands `aws setup`, `aws policy` and `aws check`."""

from __future__ import annotations

import json
import re
from typing import Annotated, Literal

import typer

from provisioner.base.config import checked, load_settings
from provisioner.base.errors import UsageError
from provisioner.cli.commands.aws_check import check
from provisioner.cli.options import parse_region
from provisioner.cli.output import Result
from provisioner.clouds.aws import setup as account_setup
from provisioner.clouds.aws.api import Api, asking
from provisioner.clouds.aws.rights import policy as rights

ROLES_REGION = "us-east-1"


def setup() -> Result:
    """Makes the roles, or corrects them."""
    settings = load_settings()
    # Roles belong to no region.
    api = Api(settings.profile, settings.region or ROLES_REGION)
    with asking("Asking AWS for the account of these credentials"):
        account = str(api.client("sts").get_caller_identity()["Account"])
    done = account_setup.set_up(api.client("iam"), account)
    return Result({"account": account, "done": done}, "\n".join(done))


TYPE = re.compile(r"[a-z0-9-]+[a-z0-9.*?-]*")


def parse_type(text: str) -> str:
    """Parses an instance type, or a pattern of several."""
    if not TYPE.fullmatch(text):
        raise typer.BadParameter("give an instance type or a pattern, such as m7i.large or 't3*'.")
    return text


def policy(
    part: Annotated[
        Literal["launch", "manage", "setup"],
        typer.Argument(help="launch and manage: the two of daily work; setup: what `aws setup` needs."),
    ],
    *,
    regions: Annotated[
        list[str] | None,
        typer.Option("--region", help="Launch only here; may be repeated. Default: everywhere.", parser=parse_region),
    ] = None,
    types: Annotated[
        list[str] | None,
        typer.Option(
            "--type",
            help="Launch only such instance types, as 't3*' or m7i.large; may be repeated. Default: all.",
            parser=parse_type,
        ),
    ] = None,
) -> Result:
    """Prints a policy as IAM accepts it."""
    if (regions or types) and part != "launch":
        raise UsageError("Regions and types limit what `aws policy launch` allows, and nothing else.")
    for region in regions or ():
        checked(region=region)
    if part == "setup":
        document = account_setup.policy()
    else:
        document = rights(part, load_settings().state, regions or (), types or ())
    return Result(document, json.dumps(document, indent=2))


COMMANDS = {
    "setup": (setup, "Make, once in an account, the roles that provisioner needs; for an administrator."),
    "policy": (policy, "Print the IAM policies with exactly the rights that provisioner needs."),
    "check": (check, "Test on your own account what provisioner does there, usually for under a dollar."),
}
