"""Puts together what EC2 sells in a region and for how much.

Prices come in layers, the first that knows one wins: the operator's own list, the account's API, and the shipped
snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from provisioner.base import strict_json
from provisioner.base.clock import now
from provisioner.base.errors import ProvisionerError, UsageError
from provisioner.base.models import Architecture, Record
from provisioner.clouds.aws.api import Api, asking
from provisioner.clouds.aws.instance_types import Catalogue, InstanceType
from provisioner.clouds.aws.vcpu_quota import family
from provisioner.costs.prices import Price, Usd
from provisioner.store.files import write_atomically

SNAPSHOT = Path(__file__).with_name("snapshot.json")
# Prices of a region change a few times a year.
KEEP_SECONDS = 24 * 3600
# AWS Price List API, "Service endpoints": it answers for all regions from a few.
PRICING_REGION = "us-east-1"
ARCHITECTURES: dict[str, Architecture] = {"x86_64": "x64", "arm64": "arm64"}
# Names of the other prices: a GiB-month of a volume, an hour of a public address, and a gigabyte sent to the internet,
# which only an operator's list has.
STORAGE, ADDRESS, EGRESS = "gp3", "ipv4", "egress"
ADDRESS_GROUP, ADDRESS_USAGE = "VPCPublicIPv4Address", "PublicIPv4:InUseAddress"


class PriceList(Record):
    """Prices by region and name: the form of the snapshot and of the operator's own list.

    Args:
        prices: region -> instance type, `gp3` (a GiB-month), `ipv4` (an hour) or `egress` (a GB) -> US dollars.
    """

    date: date
    source: str
    prices: dict[str, dict[str, Usd]]

    def of(self, region: str) -> dict[str, Price]:
        """Returns the prices of a region."""
        prices = self.prices.get(region, {})
        return {name: Price(usd=usd, source=self.source, as_of=self.date) for name, usd in prices.items()}


class Snapshot(PriceList):
    """The shipped price list, with the instance types in it.

    Of GPUs it has NVIDIA's in Nitro machines, without g5g, g6f, gr6, g7, g7e, p3dn and p6-b300, and p5e, which is not
    sold on demand. Sizes are those of AWS's "Amazon EC2 instance types: accelerated computing". Prices are on AWS's EC2
    pricing page; those of g6, g6e, p4d, p4de, p5, p5en and p6 were compared with skypilot-org/skypilot-catalog,
    catalogs/v8/aws/vms.csv at e385a0d, which is made from AWS's price API.
    """

    types: tuple[InstanceType, ...]


def load_catalogue(api: Api, region: str, kept: Path, own: Path | None) -> Catalogue:
    """Puts together the catalogue of a region.

    Args:
        kept: file in which the API's answers are kept for a day.
        own: the operator's price list, which takes precedence over all others.

    Raises:
        UsageError: the operator's price list is not valid.
    """
    snapshot_catalogue = shipped(region)
    prices = dict(snapshot_catalogue.prices)
    live = _live(api, region, kept)
    prices |= live.prices
    if own:
        prices |= read_price_list(own).of(region)
    return Catalogue(types=live.types or snapshot_catalogue.types, prices=prices, is_shipped=not live.types)


def _live(api: Api, region: str, kept: Path) -> Catalogue:
    """What the API said within the last day, or says now. What it does not say is missing."""
    try:
        kept_catalogue = strict_json.load_file(Catalogue, kept)
        if abs(now().timestamp() - kept.stat().st_mtime) < KEEP_SECONDS:
            return kept_catalogue
    except (OSError, ValueError):
        pass
    try:
        types = _fetch_types(api, region)
    except ProvisionerError:
        return Catalogue(types=(), prices={})
    try:
        prices = _fetch_prices(api, region)
    except ProvisionerError:
        prices = {}
    today = now().date()
    catalogue = Catalogue(
        types=types,
        prices={name: Price(usd=usd, source="AWS Price List API", as_of=today) for name, usd in prices.items()},
    )
    if prices:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(kept, catalogue.model_dump_json())
    return catalogue


def snapshot() -> Snapshot:
    """Reads the shipped snapshot."""
    return Snapshot.model_validate_json(SNAPSHOT.read_bytes())


def shipped(region: str) -> Catalogue:
    """Returns the catalogue of a region from the shipped price list alone."""
    shipped_list = snapshot()
    return Catalogue(types=shipped_list.types, prices=shipped_list.of(region), is_shipped=True)


def read_price_list(path: Path) -> PriceList:
    """Reads a price list from a file.

    Raises:
        UsageError: it cannot be read, or a price in it is zero or missing.
    """
    try:
        return PriceList.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"The price list {path} cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise UsageError(f"The price list {path} is not valid: {where}: {problem['msg']}") from error


def _fetch_types(api: Api, region: str) -> tuple[InstanceType, ...]:
    filters = [
        {"Name": "bare-metal", "Values": ["false"]},
        {"Name": "supported-virtualization-type", "Values": ["hvm"]},
        # Only Nitro machines show their console, and on it their host key, at once.
        {"Name": "hypervisor", "Values": ["nitro"]},
        # Not those that are sold for reserved hours alone.
        {"Name": "supported-usage-class", "Values": ["on-demand"]},
    ]
    with asking("Listing instance types"):
        pages = api.client("ec2", region).get_paginator("describe_instance_types").paginate(Filters=filters)
        return parse_types(row for page in pages for row in page["InstanceTypes"])


def parse_types(rows: Iterable[dict[str, Any]]) -> tuple[InstanceType, ...]:
    """Reads instance types from the rows of DescribeInstanceTypes.

    Without old ones, other CPUs and accelerators, and families that have quotas of their own (hpc, u).
    """
    types = []
    for row in rows:
        architectures = [
            ARCHITECTURES[name] for name in row["ProcessorInfo"]["SupportedArchitectures"] if name in ARCHITECTURES
        ]
        gpus = row.get("GpuInfo", {}).get("Gpus", [])
        others = {"FpgaInfo", "InferenceAcceleratorInfo", "NeuronInfo", "MediaAcceleratorInfo"} & row.keys()
        # EC2 calls G5 a previous generation, and it is the only one with A10G.
        is_outdated = not (row.get("CurrentGeneration", True) or gpus)
        is_special = family(row["InstanceType"]) is None
        if not architectures or others or len(gpus) > 1 or is_outdated or is_special:
            continue
        types.append(
            InstanceType(
                name=row["InstanceType"],
                vcpus=row["VCpuInfo"]["DefaultVCpus"],
                memory_gib=row["MemoryInfo"]["SizeInMiB"] / 1024,
                architecture=architectures[0],
                gpu_model=str(gpus[0]["Name"]).lower() if gpus else None,
                gpu_count=int(gpus[0]["Count"]) if gpus else 0,
                is_free=bool(row.get("FreeTierEligible")),
                has_spot="spot" in row.get("SupportedUsageClasses", ["spot"]),
            )
        )
    return tuple(types)


def _fetch_prices(api: Api, region: str) -> dict[str, Decimal]:
    machines = {
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "tenancy": "Shared",
        "capacitystatus": "Used",
    }
    queries: list[tuple[str, Mapping[str, str]]] = [
        ("AmazonEC2", machines),
        ("AmazonEC2", {"productFamily": "Storage", "volumeApiName": STORAGE}),
        ("AmazonVPC", {"group": ADDRESS_GROUP}),
    ]
    texts: list[str] = []
    with asking("Listing prices"):
        pages = api.client("pricing", PRICING_REGION).get_paginator("get_products")
        for service, terms in queries:
            filters = [
                {"Type": "TERM_MATCH", "Field": field, "Value": value}
                for field, value in {"regionCode": region, **terms}.items()
            ]
            texts += [
                text for page in pages.paginate(ServiceCode=service, Filters=filters) for text in page["PriceList"]
            ]
    return parse_prices(texts)


def parse_prices(products: Iterable[str]) -> dict[str, Decimal]:
    """Reads on-demand prices in US dollars by name, from the JSON texts of GetProducts.

    Of two prices the higher one counts. Prices of zero, or in another currency, are left out.
    """
    prices: dict[str, Decimal] = {}
    for text in products:
        product = strict_json.parse(text.encode())
        name, unit = _priced(product["product"])
        for term in product.get("terms", {}).get("OnDemand", {}).values():
            for dimension in term["priceDimensions"].values():
                try:
                    price = Decimal(dimension["pricePerUnit"].get("USD", "0"))
                except InvalidOperation:
                    continue
                if name and price > 0 and dimension.get("unit") == unit:
                    prices[name] = max(prices.get(name, price), price)
    return prices


def _priced(product: Mapping[str, Any]) -> tuple[str | None, str]:
    """What a product's price is for, and the unit in which it is counted."""
    attributes = product["attributes"]
    if attributes.get("volumeApiName") == STORAGE:
        return STORAGE, "GB-Mo"
    if attributes.get("group") == ADDRESS_GROUP:
        return (ADDRESS if str(attributes.get("usagetype", "")).endswith(ADDRESS_USAGE) else None), "Hrs"
    return attributes.get("instanceType"), "Hrs"


def spot_price(api: Api, region: str, zone: str, instance_type: str) -> Decimal | None:
    """Asks what an hour of a spot instance costs now, in US dollars; None if AWS does not say."""
    with asking("Asking for the spot price"):
        rows = api.client("ec2", region).describe_spot_price_history(
            InstanceTypes=[instance_type], ProductDescriptions=["Linux/UNIX"], AvailabilityZone=zone,
            StartTime=now(), MaxResults=10,
        )["SpotPriceHistory"]  # fmt: skip
    prices = [Decimal(row["SpotPrice"]) for row in rows if row["AvailabilityZone"] == zone]
    return max((price for price in prices if price > 0), default=None)
