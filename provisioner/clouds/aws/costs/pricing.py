"""Prices environments in one region, from price lists, the account's API and the spot market."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from functools import cached_property
from pathlib import Path

from provisioner.clouds.aws.api import Api
from provisioner.clouds.aws.costs.estimate import cost_lines, placed
from provisioner.clouds.aws.instances.instance_catalogue import load_catalogue, spot_price
from provisioner.clouds.aws.instances.instance_types import Catalogue
from provisioner.costs.prices import CostLine, hourly
from provisioner.errors import ProvisionerError, UnavailableError
from provisioner.models import Environment, MachineSize, Role

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
