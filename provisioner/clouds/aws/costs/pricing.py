"""Prices environments in one region, from price lists, the account's API and the spot market."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from functools import cached_property
from pathlib import Path

from provisioner.clouds.aws.api import Api
from provisioner.clouds.aws.instances.instance_catalogue import ADDRESS, STORAGE, load_catalogue, spot_price
from provisioner.clouds.aws.instances.instance_types import Catalogue
from provisioner.costs.prices import HOURS_PER_MONTH, CostLine, Price, hourly
from provisioner.errors import ProvisionerError, UnavailableError
from provisioner.models import Environment, MachineSize, Role

BURSTABLE = re.compile(r"t\d")
# CPU credits cost the same for all sizes, markets and regions; those of T4g a little less.
CREDITS = Price(
    usd=Decimal("0.05"),
    source="aws.amazon.com/ec2/pricing/on-demand, unlimited mode",
    as_of=date(2026, 11, 21),
)


def cost_lines(
    sizes: Mapping[Role, MachineSize],
    catalogue: Catalogue,
    *,
    has_way_out: bool,
    spot: Mapping[Role, Decimal] | None = None,
) -> tuple[CostLine, ...]:
    """Lists what costs money by the hour, one line for each item.

    Burstable types are counted as if their CPUs never rested, since load above their baseline costs extra.

    Args:
        has_way_out: whether the machines reach the internet or an allowlist, for which each needs a public address.
        spot: the price of an hour on the spot market by role, if that market is tried first. The worst case stays the
            same, since the on-demand market is tried next.

    Raises:
        UnavailableError: a price is not known. It never counts as zero.
    """
    prices = catalogue.prices
    vcpus = {instance_type.name: instance_type.vcpus for instance_type in catalogue.types}
    lines = []
    for role, size in sizes.items():
        type_prices = [_price(prices, name, f"instance type {name}") for name in size.types]
        dearest, first = max(type_prices, key=lambda price: price.usd), type_prices[0]
        lines.append(
            CostLine(
                what=f"{role}: {size.types[0]}" + (" (spot)" if spot and role in spot else ""),
                usd_per_hour=spot.get(role, first.usd) if spot else first.usd,
                worst_usd_per_hour=dearest.usd,
                source="EC2 spot price history" if spot and role in spot else first.source,
                as_of=first.as_of,
            )
        )
        if burstable := [name for name in size.types if BURSTABLE.match(name)]:
            first_hour = CREDITS.usd * vcpus[size.types[0]] if BURSTABLE.match(size.types[0]) else Decimal(0)
            lines.append(
                CostLine(
                    what=f"{role}: CPU credits at full load",
                    usd_per_hour=first_hour,
                    worst_usd_per_hour=CREDITS.usd * max(vcpus[name] for name in burstable),
                    source=CREDITS.source,
                    as_of=CREDITS.as_of,
                )
            )
        volume = _price(prices, STORAGE, "gp3 volumes")
        by_hour = volume.usd * size.disk_gib / HOURS_PER_MONTH
        lines.append(_same(f"{role}: {size.disk_gib} GiB volume", by_hour, volume))
        if has_way_out or role == "primary":
            address = _price(prices, ADDRESS, "public IPv4 addresses")
            lines.append(_same(f"{role}: public IPv4 address", address.usd, address))
    return tuple(lines)


def placed(sizes: Mapping[Role, MachineSize], placement: Mapping[str, str]) -> dict[Role, MachineSize]:
    """Returns the sizes, each with the one instance type that the placement names."""
    return {role: size.model_copy(update={"types": (placement[role],)}) for role, size in sizes.items()}


def _price(prices: Mapping[str, Price], name: str, what: str) -> Price:
    if name not in prices:
        raise UnavailableError(
            f"The price of {what} is not known, and an unknown price never counts as zero.",
            hint="May these credentials call pricing:GetProducts? `provisioner aws refresh-prices` reads AWS's public "
            "price lists, and `prices` in the configuration names a list of your own.",
        )
    return prices[name]


def _same(what: str, usd_per_hour: Decimal, price: Price) -> CostLine:
    return CostLine(
        what=what, usd_per_hour=usd_per_hour, worst_usd_per_hour=usd_per_hour, source=price.source, as_of=price.as_of
    )


# File that `refresh-prices` writes to the home's market directory.
PRICE_LIST = "prices.json"


class Pricing:
    """The prices of a region for an account.

    Args:
        directory: where the API's answers are kept.
        own: the operator's price list.
    """

    def __init__(self, api: Api, region: str, account: str, directory: Path, own: Path | None) -> None:
        self._api = api
        self._region = region
        self._kept = directory / f"aws-{account}-{region}.json"
        self._lists = [directory / PRICE_LIST]
        self._own = own

    @cached_property
    def catalogue(self) -> Catalogue:
        """What EC2 sells in the region, and for how much.

        Raises:
            UsageError: the operator's price list is not valid.
        """
        return load_catalogue(self._api, self._region, self._kept, self._lists, self._own)

    def sources(self) -> str:
        """Says where the prices are from, and how old they are."""
        sources = sorted({(price.as_of, price.source) for price in self.catalogue.prices.values()}, reverse=True)
        return "; ".join(f"{source} ({as_of})" for as_of, source in sources) or "none known for this region"

    def costs(
        self, sizes: Mapping[Role, MachineSize], *, has_way_out: bool, spot_zone: str | None
    ) -> tuple[CostLine, ...]:
        """Estimates what an environment costs by the hour.

        Args:
            spot_zone: the zone whose spot market is tried first; None for on demand only.

        Raises:
            UnavailableError: a price is not known.
        """
        spot = self._spot(self._region, spot_zone, {role: size.types[0] for role, size in sizes.items()})
        return cost_lines(sizes, self.catalogue, has_way_out=has_way_out, spot=spot)

    def usd_per_hour(self, environment: Environment) -> Decimal:
        """Returns what a placed environment costs by the hour where it is, in US dollars.

        If a price is not known, the worst case counts.
        """
        placement = environment.placement
        sizes = placed({role: machine.size for role, machine in environment.machines.items()}, placement)
        zone = placement["zone"] if placement["market"] == "spot" else None
        spot = self._spot(placement["region"], zone, {role: placement[role] for role in sizes})
        try:
            lines = cost_lines(sizes, self.catalogue, has_way_out=environment.has_way_out, spot=spot)
        except UnavailableError:
            return environment.worst_usd_per_hour
        return min(hourly(lines), environment.worst_usd_per_hour)

    def _spot(self, region: str, zone: str | None, types: Mapping[Role, str]) -> dict[Role, Decimal]:
        """The present spot prices by role, as far as AWS says."""
        prices: dict[Role, Decimal] = {}
        for role, instance_type in types.items() if zone else ():
            try:
                price = spot_price(self._api, region, zone or "", instance_type)
            except ProvisionerError:  # the on-demand price is an upper bound
                continue
            if price:
                prices[role] = price
        return prices
