"""Instance types and prices: answers of the documented form, and layers."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.errors import InfrastructureError, UsageError
from provisioner.clouds.aws.catalogue import (
    load_catalogue,
    parse_prices,
    parse_types,
    read_price_list,
    shipped,
    snapshot,
)
from provisioner.costs.prices import Price


def product(price: str, unit: str = "Hrs", currency: str = "USD", **attributes: str) -> str:
    """One element of GetProducts' PriceList (AWS Price List API reference)."""
    dimension = {"unit": unit, "pricePerUnit": {currency: price}, "description": "per On Demand Linux Instance Hour"}
    return json.dumps(
        {
            "product": {"productFamily": "Compute Instance", "attributes": attributes, "sku": "A"},
            "terms": {"OnDemand": {"A.B": {"priceDimensions": {"A.B.C": dimension}}}},
        }
    )


def row(name: str, architectures: list[str], **more: object) -> dict[str, object]:
    """One element of DescribeInstanceTypes (EC2 API reference)."""
    return {
        "InstanceType": name,
        "ProcessorInfo": {"SupportedArchitectures": architectures},
        "VCpuInfo": {"DefaultVCpus": 4},
        "MemoryInfo": {"SizeInMiB": 16384},
        **more,
    }


def test_prices_are_read_and_a_zero_is_none() -> None:
    found = parse_prices(
        [
            product("0.0208000000", instanceType="t3.small"),
            product("0.0000000000", instanceType="t3.nano"),
            product("0.7", "Quantity", instanceType="m5.large"),
            product("0.085", instanceType="c5.large"),
            product("0.102", instanceType="c5.large"),
            product("1", currency="CNY", instanceType="r5.large"),
            product("407.6800000000", instanceType="u7in-32tb.224xlarge"),
        ]
    )
    assert found == {
        "t3.small": Decimal("0.0208"), "c5.large": Decimal("0.102"), "u7in-32tb.224xlarge": Decimal("407.68"),
    }  # fmt: skip
    assert all(Price(usd=usd, source="AWS", as_of=date(2026, 11, 1)) for usd in found.values())


def test_types_are_read_and_what_no_task_asks_for_is_left_out() -> None:
    gpu = {"Gpus": [{"Name": "T4", "Manufacturer": "NVIDIA", "Count": 1}]}
    rows = [
        row("t4g.xlarge", ["arm64"]),
        row("g4dn.xlarge", ["x86_64"], GpuInfo=gpu),
        row("mac1.metal", ["x86_64_mac"]),
        row("inf1.xlarge", ["x86_64"], InferenceAcceleratorInfo={}),
        row("a1.xlarge", ["arm64"], CurrentGeneration=False),
        row("g5.xlarge", ["x86_64"], CurrentGeneration=False, GpuInfo={"Gpus": [{"Name": "A10G", "Count": 1}]}),
    ]
    arm, with_gpu, older = parse_types(rows)
    assert older.gpu_model == "a10g"
    assert (arm.architecture, arm.vcpus, arm.memory_gib, arm.gpu_count) == ("arm64", 4, 16, 0)
    assert (with_gpu.gpu_model, with_gpu.gpu_count) == ("t4", 1)


def test_types_with_quotas_of_their_own_are_left_out_and_those_without_spot_are_known() -> None:
    rows = [
        row("hpc6a.48xlarge", ["x86_64"], SupportedUsageClasses=["on-demand"]),
        row("u-6tb1.112xlarge", ["x86_64"]),
        row("u7i-12tb.224xlarge", ["x86_64"]),
        row("c6a.24xlarge", ["x86_64"], SupportedUsageClasses=["on-demand", "spot"]),
        row("m6a.24xlarge", ["x86_64"], SupportedUsageClasses=["on-demand"]),
    ]
    assert [(one.name, one.has_spot) for one in parse_types(rows)] == [("c6a.24xlarge", True), ("m6a.24xlarge", False)]


def test_the_snapshot_says_what_it_is_and_prices_every_type() -> None:
    assert set(snapshot().prices) == {"us-east-1", "us-east-2", "us-west-2"}
    found = shipped("us-east-1")
    assert all("aws.amazon.com" in price.source and price.as_of.year >= 2026 for price in found.prices.values())
    names = [one.name for one in found.types]
    assert len(names) == len(set(names))
    assert {*names, "gp3", "ipv4"} == found.prices.keys()
    assert min(found.hourly_usd.values()) > 0
    assert shipped("eu-west-1").hourly_usd == {}


def test_volumes_and_addresses_are_found_in_the_price_list_api() -> None:
    volume, address = {"volumeApiName": "gp3"}, {"group": "VPCPublicIPv4Address"}
    found = parse_prices(
        [
            product("0.08", "GB-Mo", **volume, usagetype="EBS:VolumeUsage.gp3"),
            product("0.005", "IOPS-Mo", **volume, usagetype="EBS:VolumeP-IOPS.gp3"),
            product("0.005", **address, usagetype="USE1-PublicIPv4:InUseAddress"),
            product("0.006", **address, usagetype="PublicIPv4:IdleAddress"),
        ]
    )
    assert found == {"gp3": Decimal("0.08"), "ipv4": Decimal("0.005")}


@pytest.mark.parametrize("usd", ["0", "-1", "NaN", "x"])
def test_a_price_of_nothing_is_no_price(tmp_path: Path, usd: str) -> None:
    with pytest.raises(ValueError, match="validation"):
        Price.model_validate({"usd": usd, "source": "s", "as_of": "2026-01-01"})
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"date": "2026-01-01", "source": "s", "prices": {"us-east-1": {"t3.small": usd}}}))
    with pytest.raises(UsageError, match="us-east-1"):
        read_price_list(path)


class NoApi:
    """An account whose API does not answer."""

    def client(self, *_: Any) -> Any:
        raise InfrastructureError("no answer")


def test_the_operators_prices_go_before_all_others(tmp_path: Path) -> None:
    kept, own = tmp_path / "kept.json", tmp_path / "own.json"
    api: Any = NoApi()

    def price_list(path: Path, usd: str, source: str) -> None:
        told = {"date": "2026-01-01", "source": source, "prices": {"us-east-1": {"t3.small": usd}}}
        path.write_text(json.dumps(told))

    def price() -> tuple[Decimal, str]:
        found = load_catalogue(api, "us-east-1", kept, own if own.exists() else None).prices["t3.small"]
        return found.usd, found.source

    assert price()[0] == Decimal("0.0208")
    live = shipped("us-east-1")
    told = Price(usd=Decimal("0.04"), source="AWS Price List API", as_of=date(2026, 1, 1))
    kept.write_text(live.model_copy(update={"prices": {"t3.small": told}}).model_dump_json())
    assert price() == (Decimal("0.04"), "AWS Price List API")
    price_list(own, "0.01", "our contract")
    assert price() == (Decimal("0.01"), "our contract")
    with pytest.raises(UsageError, match="cannot be read"):
        load_catalogue(api, "us-east-1", kept, tmp_path / "missing.json")
