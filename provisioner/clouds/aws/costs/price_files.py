"""Reads AWS's public price list files, by URL and without credentials, for when the API cannot be used.

AWS documentation, "Getting AWS service attributes and price lists manually": there is an index.csv for each service and
region, with five lines about the file, a header, and a row for each price.
"""

from __future__ import annotations

import csv
import io
import itertools
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import BinaryIO, cast

from provisioner.clouds.aws.instances.instance_catalogue import (
    ADDRESS,
    ADDRESS_GROUP,
    ADDRESS_USAGE,
    STORAGE,
    PriceList,
)
from provisioner.errors import InfrastructureError

URL = "https://pricing.us-east-1.amazonaws.com/offers/v1.0/aws/{service}/current/{region}/index.csv"
SERVICES = ("AmazonEC2", "AmazonVPC")
TIMEOUT_SECONDS = 60
LINES_ABOUT_THE_FILE = 5

Open = Callable[[str], AbstractContextManager[BinaryIO]]


def _open(url: str) -> AbstractContextManager[BinaryIO]:
    return cast(AbstractContextManager[BinaryIO], urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS))  # noqa: S310


def fetch(
    regions: Iterable[str], types: Collection[str], tell: Callable[[str], None], open_url: Open = _open
) -> PriceList:
    """Reads the prices of regions. The files are hundreds of megabytes in size; none is kept.

    Args:
        types: the instance types to price.
        tell: called with a line for each file.
        open_url: opens a URL.

    Raises:
        InfrastructureError: a file cannot be read, has another format, or lacks a price.
    """
    prices: dict[str, dict[str, Decimal]] = {}
    published: list[date] = []
    for region in regions:
        regional: dict[str, Decimal] = {}
        for service in SERVICES:
            url = URL.format(service=service, region=region)
            tell(f"Reading {url}")
            try:
                with open_url(url) as stream:
                    when, rows = _rows(io.TextIOWrapper(stream, encoding="utf-8", newline=""))
                    regional |= parse_rows(rows, types)
            except (OSError, ValueError, KeyError, csv.Error) as error:
                raise InfrastructureError(
                    f"The price list {url} cannot be read: {type(error).__name__}: {error}",
                    hint="Is the region's name right, and does this machine reach AWS?",
                ) from error
            published.append(when)
        if missing := {STORAGE, ADDRESS} - regional.keys():
            raise InfrastructureError(f"AWS's price lists for {region} have no price of {', '.join(sorted(missing))}.")
        prices[region] = dict(sorted(regional.items()))
    return PriceList(date=min(published), source="AWS price list files", prices=prices)


def _rows(text: io.TextIOWrapper) -> tuple[date, Iterator[dict[str, str]]]:
    """The date of publication, and the rows."""
    lines = csv.reader(itertools.islice(text, LINES_ABOUT_THE_FILE))
    about = {line[0]: line[1] for line in lines if len(line) > 1}
    if about.get("FormatVersion") != "v1.0":
        raise ValueError(f"its format is {about.get('FormatVersion')!r}, not v1.0")
    when = datetime.fromisoformat(about["Publication Date"].replace("Z", "+00:00")).date()
    return when, csv.DictReader(text)


def parse_rows(rows: Iterable[dict[str, str]], types: Collection[str]) -> dict[str, Decimal]:
    """Reads on-demand prices in US dollars by name; of two prices, the higher one counts."""
    prices: dict[str, Decimal] = {}
    for row in rows:
        if row.get("TermType") != "OnDemand" or row.get("Currency") != "USD":
            continue
        name = _name(row, types)
        try:
            price = Decimal(row["PricePerUnit"])
        except InvalidOperation:
            continue
        if name and price > 0:
            prices[name] = max(prices.get(name, price), price)
    return prices


def _name(row: dict[str, str], types: Collection[str]) -> str | None:
    """What a row's price is for; None if it is of no interest."""
    if row.get("Volume API Name") == STORAGE and row["Unit"] == "GB-Mo" and row["Product Family"] == "Storage":
        return STORAGE
    if row.get("Group") == ADDRESS_GROUP and row["Unit"] == "Hrs" and row["usageType"].endswith(ADDRESS_USAGE):
        return ADDRESS
    kind = {"Tenancy": "Shared", "Operating System": "Linux", "Pre Installed S/W": "NA", "CapacityStatus": "Used"}
    if row.get("Instance Type") in types and row["Unit"] == "Hrs" and all(row.get(k) == v for k, v in kind.items()):
        return row["Instance Type"]
    return None
