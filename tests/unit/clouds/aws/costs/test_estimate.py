"""Prices: layers, what an environment costs, and AWS's price list files."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from provisioner.clouds.aws.costs.price_files import fetch
from provisioner.clouds.aws.costs.pricing import cost_lines, placed
from provisioner.clouds.aws.instances.instance_catalogue import (
    load_catalogue,
    parse_prices,
    read_price_list,
    shipped,
    snapshot,
)
from provisioner.costs.prices import Price, hourly, worst_hourly
from provisioner.errors import InfrastructureError, UnavailableError, UsageError
from provisioner.models import MachineSize, Role
from tests.unit.conftest import CommandLine

MARKET = shipped("us-east-1")
SIZES: dict[Role, MachineSize] = {
    "primary": MachineSize(cpus=2, memory_gib=2, disk_gib=16, types=("t3.small", "t3.medium")),
    "aux": MachineSize(cpus=2, memory_gib=4, disk_gib=84, types=("t3.medium",)),
}
# Two machines with two vCPUs each, at full load.
CREDITS = 4 * Decimal("0.05")
# 672 hours are in the shortest month.
VOLUMES = Decimal("0.08") * 100 / 672


def test_instances_volumes_and_addresses_count_at_their_worst() -> None:
    offline = cost_lines(SIZES, MARKET, has_way_out=False)
    assert hourly(offline) == Decimal("0.0208") + Decimal("0.0416") + Decimal("0.005") + VOLUMES + CREDITS
    assert worst_hourly(offline) == 2 * Decimal("0.0416") + Decimal("0.005") + VOLUMES + CREDITS
    online = cost_lines(SIZES, MARKET, has_way_out=True)
    assert hourly(online) - hourly(offline) == Decimal("0.005")
    assert [line.what for line in offline] == [
        "primary: t3.small", "primary: CPU credits at full load", "primary: 16 GiB volume",
        "primary: public IPv4 address", "aux: t3.medium", "aux: CPU credits at full load", "aux: 84 GiB volume",
    ]  # fmt: skip
    assert all("aws.amazon.com" in line.source and line.age_days(line.as_of) == 0 for line in offline)


def test_what_cannot_burst_costs_no_credits() -> None:
    steady: dict[Role, MachineSize] = {"primary": MachineSize(cpus=2, memory_gib=4, disk_gib=16, types=("c5.large",))}
    assert not [line for line in cost_lines(steady, MARKET, has_way_out=False) if "credits" in line.what]


def test_the_spot_market_makes_nothing_cheaper_at_the_worst() -> None:
    spot = cost_lines(SIZES, MARKET, has_way_out=False, spot={"primary": Decimal("0.006")})
    assert spot[0].what == "primary: t3.small (spot)"
    assert (spot[0].usd_per_hour, spot[0].worst_usd_per_hour) == (Decimal("0.006"), Decimal("0.0416"))
    assert spot[0].source == "EC2 spot price history"


def test_where_it_ended_up_decides_what_it_cost() -> None:
    lines = cost_lines(placed(SIZES, {"primary": "t3.medium", "aux": "t3.medium"}), MARKET, has_way_out=False)
    assert hourly(lines) == worst_hourly(lines) == 2 * Decimal("0.0416") + Decimal("0.005") + VOLUMES + CREDITS


@pytest.mark.parametrize("unknown", ["t3.medium", "gp3", "ipv4"])
def test_an_unknown_price_refuses(unknown: str) -> None:
    prices = {name: price for name, price in MARKET.prices.items() if name != unknown}
    known = MARKET.model_copy(update={"prices": prices})
    with pytest.raises(UnavailableError, match="never counts as zero"):
        cost_lines(SIZES, known, has_way_out=False)


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
    kept, refreshed, own = tmp_path / "kept.json", tmp_path / "refreshed.json", tmp_path / "own.json"
    api: Any = NoApi()

    def price_list(path: Path, usd: str, source: str) -> None:
        told = {"date": "2026-01-01", "source": source, "prices": {"us-east-1": {"t3.small": usd}}}
        path.write_text(json.dumps(told))

    def price() -> tuple[Decimal, str]:
        found = load_catalogue(api, "us-east-1", kept, [refreshed], own if own.exists() else None).prices["t3.small"]
        return found.usd, found.source

    assert price()[0] == Decimal("0.0208")
    price_list(refreshed, "0.03", "refreshed")
    assert price() == (Decimal("0.03"), "refreshed")
    live = shipped("us-east-1")
    told = Price(usd=Decimal("0.04"), source="AWS Price List API", as_of=date(2026, 1, 1))
    kept.write_text(live.model_copy(update={"prices": {"t3.small": told}}).model_dump_json())
    assert price() == (Decimal("0.04"), "AWS Price List API")
    price_list(own, "0.01", "our contract")
    assert price() == (Decimal("0.01"), "our contract")
    with pytest.raises(UsageError, match="cannot be read"):
        load_catalogue(api, "us-east-1", kept, [], tmp_path / "missing.json")


def product(attributes: dict[str, str], unit: str, price: str) -> str:
    dimension = {"unit": unit, "pricePerUnit": {"USD": price}}
    return json.dumps(
        {"product": {"attributes": attributes}, "terms": {"OnDemand": {"A": {"priceDimensions": {"B": dimension}}}}}
    )


def test_volumes_and_addresses_are_found_in_the_price_list_api() -> None:
    found = parse_prices(
        [
            product({"volumeApiName": "gp3", "usagetype": "EBS:VolumeUsage.gp3"}, "GB-Mo", "0.08"),
            product({"volumeApiName": "gp3", "usagetype": "EBS:VolumeP-IOPS.gp3"}, "IOPS-Mo", "0.005"),
            product({"group": "VPCPublicIPv4Address", "usagetype": "USE1-PublicIPv4:InUseAddress"}, "Hrs", "0.005"),
            product({"group": "VPCPublicIPv4Address", "usagetype": "PublicIPv4:IdleAddress"}, "Hrs", "0.006"),
        ]
    )
    assert found == {"gp3": Decimal("0.08"), "ipv4": Decimal("0.005")}


# As in "Reading the price list files": lines about the file, a header, a row for each price.
FILES = Path(__file__).parent / "price_lists"
EC2 = (FILES / "AmazonEC2.csv").read_text()
ABOUT = "".join(EC2.splitlines(keepends=True)[:5])


@contextlib.contextmanager
def opened(url: str) -> Iterator[Any]:
    service = url.split("/aws/")[1].split("/")[0]
    with (FILES / f"{service}.csv").open("rb") as file:
        yield file


def test_the_price_list_files_are_read(tmp_path: Path) -> None:
    told: list[str] = []
    found = fetch(["us-east-1"], {"t3.small"}, told.append, opened)
    wanted = {"t3.small": Decimal("0.0208"), "gp3": Decimal("0.08"), "ipv4": Decimal("0.005")}
    assert (found.prices, found.date) == ({"us-east-1": wanted}, date(2026, 11, 18))
    assert all("/current/us-east-1/index.csv" in line for line in told)
    (tmp_path / "prices.json").write_text(found.model_dump_json())
    assert read_price_list(tmp_path / "prices.json") == found


@pytest.mark.parametrize(
    "text",
    ["", "<html>", ABOUT.replace("v1.0", "v2.0"), ABOUT + '"SKU"\n"A"\n', "".join(EC2.splitlines(keepends=True)[:6])],
)
def test_a_price_list_of_another_form_is_refused(text: str) -> None:
    @contextlib.contextmanager
    def other(_: str) -> Iterator[Any]:
        yield io.BytesIO(text.encode())

    with pytest.raises(InfrastructureError):
        fetch(["us-east-1"], {"t3.small"}, lambda _: None, other)


def test_the_shipped_prices_say_where_they_are_from() -> None:
    known = snapshot()
    assert "aws.amazon.com" in known.source
    assert set(known.prices) == {"us-east-1", "us-east-2", "us-west-2"}


def test_a_plan_of_what_is_not_built_creates_nothing(provisioner: CommandLine) -> None:
    planned = provisioner("plan", "examples/number_guess", "easy", "--ttl", "30m", "--json")
    assert planned.code == 0, planned.stderr
    data = planned.json
    assert (data["image"], data["full_internet"], data["lines"], data["worst_micro_usd"]) == (None, None, [], 0)
    assert data["limit_seconds"] == 1800
    text = provisioner("plan", "examples/number_guess", "easy").stdout
    assert "to be built first" in text
    assert "Costs nothing" in text
    assert not list((provisioner.home / "environments").iterdir())
    assert provisioner("plan", "examples/number_guess", "easy", "--ttl", "never").code == 2
