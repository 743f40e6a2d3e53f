"""aws policy, aws refresh-prices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from provisioner.cli.context import command, session
from provisioner.cli.output import Result
from provisioner.config import checked, load_settings
from provisioner.store.files import write_atomically


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name="aws")
    command(group, "policy", help="Print the IAM policy with the rights that provisioner needs, and no more.")(policy)
    command(group, "refresh-prices", help="Read AWS's public price lists, for when its API cannot be asked.")(
        refresh_prices
    )


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


def refresh_prices(
    region: Annotated[
        list[str] | None, typer.Option("--region", help="Which region's prices; repeatable. Default: the snapshot's.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Default: the provisioner home's.", show_default=False),
    ] = None,
) -> Result:
    """Reads AWS's public price list files, without credentials."""
    from provisioner.clouds.aws import instance_catalogue, price_files
    from provisioner.clouds.aws.pricing import PRICE_LIST

    opened = session()
    shipped = instance_catalogue.snapshot()
    regions = [checked(region=name).region for name in region] if region else sorted(shipped.prices)
    known = price_files.fetch(regions, {one.name for one in shipped.types}, opened.progress.note)
    path = output or opened.home.root / "market" / PRICE_LIST
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, known.model_dump_json(indent=1))
    count = sum(len(prices) for prices in known.prices.values())
    data = {"file": str(path), "date": str(known.date), "regions": regions, "prices": count}
    return Result(data, f"{count} prices of {known.date} in {path}")
