"""The commands `aws setup`, `aws policy` and `aws check`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from provisioner.base.config import load_settings
from provisioner.cli.commands.aws_check import check
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


def policy(
    *,
    for_setup: Annotated[
        bool, typer.Option("--setup", help="The rights that `aws setup` needs instead, for an administrator.")
    ] = False,
) -> Result:
    """Prints the policy as IAM accepts it."""
    document = account_setup.policy() if for_setup else rights(load_settings().state)
    return Result(document, json.dumps(document, indent=2))


COMMANDS = {
    "setup": (setup, "Make, once in an account, the roles that provisioner needs; for an administrator."),
    "policy": (policy, "Print the IAM policy with exactly the rights that provisioner needs."),
    "check": (check, "Test on your own account what provisioner does there, usually for under a dollar."),
}
