"""What EC2 sells in a region and for how much, in layers: the operator's own prices over what the account's API says,
over what `refresh-prices` kept, over a shipped snapshot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import date
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from provisioner.clock import now
from provisioner.clouds.aws.api import Api, asking
from provisioner.clouds.aws.instance_types import Catalogue, InstanceType
from provisioner.costs.prices import Price, Usd
from provisioner.errors import ProvisionerError, UsageError
from provisioner.models import Architecture, Record
from provisioner.store.files import write_atomically

SNAPSHOT = Path(__file__).with_name("snapshot.json")
# Prices of a region change a few times a year.
KEEP_SECONDS = 24 * 3600
# AWS Price List API, "Service endpoints": it answers for all regions from a few.
PRICING_REGION = "us-east-1"
ARCHITECTURES: dict[str, Architecture] = {"x86_64": "x64", "arm64": "arm64"}
# Names of prices that are no instance type's: a GiB-month of a volume, and an hour of a public address.
STORAGE, ADDRESS = "gp3", "ipv4"
ADDRESS_GROUP, ADDRESS_USAGE = "VPCPublicIPv4Address", "PublicIPv4:InUseAddress"


class PriceList(Record):
    """Prices by region and name, as the snapshot, the operator's own file and `refresh-prices` write them.

    Args:
        prices: region -> instance type, `gp3` (a GiB-month) or `ipv4` (an hour) -> US dollars.
    """

    date: date
    source: str
    prices: dict[str, dict[str, Usd]]

    def of(self, region: str) -> dict[str, Price]:
        """The prices of a region."""
        found = self.prices.get(region, {})
        return {name: Price(usd=usd, source=self.source, as_of=self.date) for name, usd in found.items()}


class Snapshot(PriceList):
    """The shipped price list, with the instance types that it prices."""

    types: tuple[InstanceType, ...]


def load_catalogue(api: Api, region: str, kept: Path, lists: Iterable[Path] = (), own: Path | None = None) -> Catalogue:
    """Puts together the catalogue of a region.

    Args:
        kept: file that keeps the API's answers for a day.
        lists: price lists that `refresh-prices` has written, where they exist.
        own: the operator's price list; its prices go before all others.

    Raises:
        UsageError: the operator's price list is not valid.
    """
    known = shipped(region)
    prices = dict(known.prices)
    for path in lists:
        if path.exists():
            prices |= read_price_list(path).of(region)
    live = _live(api, region, kept)
    prices |= live.prices
    if own:
        prices |= read_price_list(own).of(region)
    return Catalogue(types=live.types or known.types, prices=prices)


def _live(api: Api, region: str, kept: Path) -> Catalogue:
    """What was asked in the last day, else what the API says; without what it does not say."""
    try:
        known = Catalogue.model_validate_json(kept.read_bytes())
        if now().timestamp() - kept.stat().st_mtime < KEEP_SECONDS:
            return known
    except (OSError, ValidationError):
        pass
    try:
        types = _ask_types(api, region)
    except ProvisionerError:
        return Catalogue(types=(), prices={})
    try:
        prices = _ask_prices(api, region)
    except ProvisionerError:
        prices = {}
    today = now().date()
    found = Catalogue(
        types=types,
        prices={name: Price(usd=usd, source="AWS Price List API", as_of=today) for name, usd in prices.items()},
    )
    if prices:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(kept, found.model_dump_json())
    return found


def snapshot() -> Snapshot:
    """The shipped snapshot."""
    return Snapshot.model_validate_json(SNAPSHOT.read_bytes())


def shipped(region: str) -> Catalogue:
    """Returns the catalogue of a region by the shipped snapshot alone."""
    known = snapshot()
    return Catalogue(types=known.types, prices=known.of(region))


def read_price_list(path: Path) -> PriceList:
    """A price list from a file.

    Raises:
        UsageError: it cannot be read, or a price in it is zero or none.
    """
    try:
        return PriceList.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"The price list {path} cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise UsageError(f"The price list {path} is not valid: {where}: {problem['msg']}") from error


def _ask_types(api: Api, region: str) -> tuple[InstanceType, ...]:
    filters = [
        {"Name": "current-generation", "Values": ["true"]},
        {"Name": "bare-metal", "Values": ["false"]},
        {"Name": "supported-virtualization-type", "Values": ["hvm"]},
        # Its machines tell their console, and by it their host key, at once.
        {"Name": "hypervisor", "Values": ["nitro"]},
    ]
    with asking("Listing instance types"):
        pages = api.client("ec2", region).get_paginator("describe_instance_types").paginate(Filters=filters)
        return parse_types(row for page in pages for row in page["InstanceTypes"])


def parse_types(rows: Iterable[dict[str, Any]]) -> tuple[InstanceType, ...]:
    """Instance types from the rows of DescribeInstanceTypes; those with other CPUs or accelerators are left out."""
    found = []
    for row in rows:
        named = [ARCHITECTURES[a] for a in row["ProcessorInfo"]["SupportedArchitectures"] if a in ARCHITECTURES]
        gpus = row.get("GpuInfo", {}).get("Gpus", [])
        others = {"FpgaInfo", "InferenceAcceleratorInfo", "NeuronInfo", "MediaAcceleratorInfo"} & row.keys()
        if not named or others or len(gpus) > 1:
            continue
        found.append(
            InstanceType(
                name=row["InstanceType"],
                vcpus=row["VCpuInfo"]["DefaultVCpus"],
                memory_gib=row["MemoryInfo"]["SizeInMiB"] / 1024,
                architecture=named[0],
                gpu_model=str(gpus[0]["Name"]).lower() if gpus else None,
                gpu_count=int(gpus[0]["Count"]) if gpus else 0,
            )
        )
    return tuple(found)


def _ask_prices(api: Api, region: str) -> dict[str, Decimal]:
    machines = {
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "tenancy": "Shared",
        "capacitystatus": "Used",
    }
    questions: list[tuple[str, Mapping[str, str]]] = [
        ("AmazonEC2", machines),
        ("AmazonEC2", {"productFamily": "Storage", "volumeApiName": STORAGE}),
        ("AmazonVPC", {"group": ADDRESS_GROUP}),
    ]
    texts: list[str] = []
    with asking("Listing prices"):
        pages = api.client("pricing", PRICING_REGION).get_paginator("get_products")
        for service, terms in questions:
            filters = [
                {"Type": "TERM_MATCH", "Field": field, "Value": value}
                for field, value in {"regionCode": region, **terms}.items()
            ]
            texts += [t for page in pages.paginate(ServiceCode=service, Filters=filters) for t in page["PriceList"]]
    return parse_prices(texts)


def parse_prices(products: Iterable[str]) -> dict[str, Decimal]:
    """US dollars on demand by name, from the JSON texts of GetProducts.

    What has two prices is dearer here than it may be, never cheaper; what costs nothing, or is not in US dollars, has
    no price.
    """
    found: dict[str, Decimal] = {}
    for text in products:
        product = json.loads(text)
        name, unit = _priced(product["product"])
        for term in product.get("terms", {}).get("OnDemand", {}).values():
            for dimension in term["priceDimensions"].values():
                try:
                    price = Decimal(dimension["pricePerUnit"].get("USD", "0"))
                except InvalidOperation:
                    continue
                if name and price > 0 and dimension.get("unit") == unit:
                    found[name] = max(found.get(name, price), price)
    return found


def _priced(product: Mapping[str, Any]) -> tuple[str | None, str]:
    """The name of what a product's price is for, and the unit that it is counted in."""
    attributes = product["attributes"]
    if attributes.get("volumeApiName") == STORAGE:
        return STORAGE, "GB-Mo"
    if attributes.get("group") == ADDRESS_GROUP:
        return (ADDRESS if str(attributes.get("usagetype", "")).endswith(ADDRESS_USAGE) else None), "Hrs"
    return attributes.get("instanceType"), "Hrs"


def spot_price(api: Api, region: str, zone: str, instance_type: str) -> Decimal | None:
    """US dollars for an hour of a spot instance now; None: AWS does not say."""
    with asking("Asking for the spot price"):
        rows = api.client("ec2", region).describe_spot_price_history(
            InstanceTypes=[instance_type], ProductDescriptions=["Linux/UNIX"], AvailabilityZone=zone,
            StartTime=now(), MaxResults=10,
        )["SpotPriceHistory"]  # fmt: skip
    found = [Decimal(row["SpotPrice"]) for row in rows if row["AvailabilityZone"] == zone]
    return max((price for price in found if price > 0), default=None)
