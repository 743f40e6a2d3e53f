"""Adds up what an environment's machines cost on EC2: instances, volumes and public addresses. Pure.

Not included are data that leaves AWS, which cannot be known in advance, and the images, which stay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from decimal import Decimal

from provisioner.clouds.aws.instances.instance_catalogue import ADDRESS, STORAGE
from provisioner.clouds.aws.instances.instance_types import Catalogue
from provisioner.costs.prices import HOURS_PER_MONTH, CostLine, Price
from provisioner.errors import UnavailableError
from provisioner.models import MachineSize, Role

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
