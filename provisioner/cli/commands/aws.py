"""The commands `aws setup`, `aws policy`, `aws check` and `aws refresh-prices`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from provisioner.base.config import checked, load_settings
from provisioner.base.errors import UsageError
from provisioner.cli.commands.aws_check import check
from provisioner.cli.options import ProfileOption, StateOption
from provisioner.cli.output import Result
from provisioner.cli.sessions import session
from provisioner.clouds.aws import catalogue
from provisioner.clouds.aws import setup as account_setup
from provisioner.clouds.aws.api import Api, asking
from provisioner.clouds.aws.rights import policy as rights
from provisioner.store.files import write_atomically

ROLES_REGION = "us-east-1"


def _region(name: str) -> str:
    if not re.fullmatch(r"[a-z]+(-[a-z]+)+-\d+", name):
        raise UsageError(f"--region {name!r} is not the name of an AWS region, such as us-east-1.")
    return name


def setup(profile: ProfileOption = None) -> Result:
    """Makes the roles, or corrects them."""
    settings = load_settings() if profile is None else checked(profile=profile)
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
    state: StateOption = None,
) -> Result:
    """Prints the policy as IAM accepts it."""
    settings = load_settings() if state is None else checked(state=state)
    document = account_setup.policy() if for_setup else rights(settings.state)
    return Result(document, json.dumps(document, indent=2))


def refresh_prices(
    region: Annotated[
        list[str] | None,
        typer.Option("--region", help="Region whose prices to read; repeatable. Default: the snapshot's."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Default: a file in the provisioner home.")
    ] = None,
) -> Result:
    """Reads AWS's public price list files, without credentials."""
    opened = session()
    shipped = catalogue.snapshot()
    regions = [_region(name) for name in region] if region else sorted(shipped.prices)
    price_list = catalogue.fetch(regions, {machine_type.name for machine_type in shipped.types}, opened.progress.note)
    path = output or opened.home.root / "market" / catalogue.PRICE_LIST
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, price_list.model_dump_json(indent=1))
    count = sum(len(prices) for prices in price_list.prices.values())
    data = {"file": str(path), "date": str(price_list.date), "regions": regions, "prices": count}
    return Result(data, f"{count} prices of {price_list.date} in {path}")


COMMANDS = {
    "setup": (setup, "Make, once in an account, the roles that provisioner needs; for an administrator."),
    "policy": (policy, "Print the IAM policy with exactly the rights that provisioner needs."),
    "check": (check, "Test on your own account what provisioner does there, usually for under a dollar."),
    "refresh-prices": (refresh_prices, "Read AWS's public price lists, for when its API cannot be asked."),
}
