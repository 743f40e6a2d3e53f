"""What an environment costs by the hour."""

from __future__ import annotations

from decimal import Decimal

import pytest

from provisioner.base.errors import UnavailableError
from provisioner.base.models import MachineSize, Role
from provisioner.clouds.aws.catalogue import (
    shipped,
)
from provisioner.clouds.aws.sizing import cost_lines, placed
from provisioner.costs.prices import hourly, worst_hourly
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
