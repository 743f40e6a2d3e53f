"""What EC2 sells in a region and for how much: asked of the account, with a shipped snapshot where it cannot be."""

from __future__ import annotations

import json
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from provisioner.clouds.aws.api import Api, asking
from provisioner.clouds.aws.instance_types import InstanceType, Market
from provisioner.errors import ProvisionerError
from provisioner.image_store import now
from provisioner.models import Architecture
from provisioner.paths import write_atomically

SNAPSHOT = Path(__file__).with_name("snapshot.json")
# Prices of a region change a few times a year.
KEEP_SECONDS = 24 * 3600
# AWS Price List API, "Service endpoints": it answers for all regions from a few.
PRICING_REGION = "us-east-1"
ARCHITECTURES: dict[str, Architecture] = {"x86_64": "x64", "arm64": "arm64"}


def market(api: Api, region: str, kept: Path) -> Market:
    """The market of a region: from what was asked in the last day, else from the API, else from the snapshot.

    Args:
        kept: file that keeps the answers.
    """
    try:
        known = Market.model_validate_json(kept.read_bytes())
        if now().timestamp() - kept.stat().st_mtime < KEEP_SECONDS:
            return known
    except (OSError, ValidationError):
        pass
    shipped = snapshot(region)
    try:
        types = _ask_types(api, region)
    except ProvisionerError:
        return shipped
    try:
        prices = _ask_prices(api, region)
    except ProvisionerError:
        prices = {}
    if not prices:
        return Market(types=types, hourly_usd=shipped.hourly_usd, source=shipped.source)
    found = Market(types=types, hourly_usd=prices, source=f"AWS Price List API, {now():%Y-%m-%d}")
    kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(kept, found.model_dump_json())
    return found


def snapshot(region: str) -> Market:
    """The shipped snapshot: a few types, and their prices where it knows them for the region."""
    data = json.loads(SNAPSHOT.read_text())
    prices = {row["name"]: Decimal(row.pop("usd")) for row in data["types"]}
    return Market(
        types=tuple(InstanceType.model_validate(row) for row in data["types"]),
        hourly_usd=prices if region in data["regions"] else {},
        source=f"snapshot of {data['date']}: {data['source']}",
    )


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
    terms = {
        "regionCode": region,
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "tenancy": "Shared",
        "capacitystatus": "Used",
    }
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in terms.items()]
    with asking("Listing prices"):
        pages = api.client("pricing", PRICING_REGION).get_paginator("get_products")
        return parse_prices(
            text for page in pages.paginate(ServiceCode="AmazonEC2", Filters=filters) for text in page["PriceList"]
        )


def parse_prices(products: Iterable[str]) -> dict[str, Decimal]:
    """US dollars per hour on demand, by instance type, from the JSON texts of GetProducts.

    A type with two prices is dearer here than it may be, never cheaper; one whose price is zero or none has none.
    """
    found: dict[str, Decimal] = {}
    for text in products:
        product = json.loads(text)
        name = product["product"]["attributes"].get("instanceType")
        for term in product.get("terms", {}).get("OnDemand", {}).values():
            for dimension in term["priceDimensions"].values():
                try:
                    price = Decimal(dimension["pricePerUnit"].get("USD", "0"))
                except InvalidOperation:
                    continue
                if name and price > 0 and dimension.get("unit") == "Hrs":
                    found[name] = max(found.get(name, price), price)
    return found
