"""Instance types and prices, from answers of the documented form."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal

from provisioner.clouds.aws.instances.instance_catalogue import SNAPSHOT, parse_prices, parse_types, shipped
from provisioner.costs.prices import Price


def product(name: str, price: str, unit: str = "Hrs", currency: str = "USD") -> str:
    """One element of GetProducts' PriceList (AWS Price List API reference)."""
    dimension = {"unit": unit, "pricePerUnit": {currency: price}, "description": "per On Demand Linux Instance Hour"}
    return json.dumps(
        {
            "product": {"productFamily": "Compute Instance", "attributes": {"instanceType": name}, "sku": "A"},
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
            product("t3.small", "0.0208000000"), product("t3.nano", "0.0000000000"),
            product("m5.large", "0.7", "Quantity"),
            product("c5.large", "0.085"), product("c5.large", "0.102"), product("r5.large", "1", currency="CNY"),
        ]
    )  # fmt: skip
    assert found == {"t3.small": Decimal("0.0208"), "c5.large": Decimal("0.102")}


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


def test_the_snapshot_says_what_it_is_and_prices_every_type() -> None:
    found = shipped("us-east-1")
    assert all("aws.amazon.com" in price.source and price.as_of.year >= 2026 for price in found.prices.values())
    assert {one.name for one in found.types} | {"gp3", "ipv4"} == found.prices.keys()
    assert min(found.hourly_usd.values()) > 0
    assert shipped("eu-west-1").hourly_usd == {}


def test_a_machine_of_hundreds_of_dollars_an_hour_has_a_price() -> None:
    prices = parse_prices([product("u7in-32tb.224xlarge", "407.6800000000")])
    assert Price(usd=prices["u7in-32tb.224xlarge"], source="AWS", as_of=date(2026, 11, 1)).usd == Decimal("407.68")


def test_the_snapshot_names_no_type_twice() -> None:
    names = [instance_type["name"] for instance_type in json.loads(SNAPSHOT.read_bytes())["types"]]
    assert len(names) == len(set(names))
