"""Chooses instance types, counts what the account's quotas have room for, and estimates costs by the hour."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from datetime import date, datetime
from decimal import Decimal
from functools import cached_property
from pathlib import Path

from provisioner.base.clock import now
from provisioner.base.errors import ImageBuildError, ProvisionerError, UnavailableError
from provisioner.base.models import BaseImage, Environment, MachineSize, Role, VMSpec
from provisioner.clouds.aws import vcpu_quota
from provisioner.clouds.aws.account import Account
from provisioner.clouds.aws.catalogue import ADDRESS, EGRESS, STORAGE, load_catalogue, spot_price
from provisioner.clouds.aws.images import vendor_ami
from provisioner.clouds.aws.instance_types import Catalogue, choose_builder, choose_machines
from provisioner.clouds.aws.network import Networks
from provisioner.clouds.aws.traffic import meter, network_out
from provisioner.clouds.aws.vcpu_quota import Market, Quotas, Room
from provisioner.clouds.cloud import Scarcity
from provisioner.costs.prices import HOURS_PER_MONTH, CostLine, Egress, Price, hourly
from provisioner.family.manifest import Resources
from provisioner.store.files import write_atomically

# How long the note counts. The free plan itself ends after six months (AWS Billing user guide, "Free Tier").
FREE_PLAN_SECONDS = 7 * 24 * 3600.0
UPGRADE_HINT = "Upgrade the account to the paid plan (AWS console, Billing and Cost Management), or use another."
QUOTA_HINT = "Ask AWS for a larger quota (Service Quotas, Amazon EC2)."

BURSTABLE = re.compile(r"t\d")
# CPU credits cost the same for all sizes, markets and regions; those of T4g a little less.
CREDITS = Price(
    usd=Decimal("0.05"),
    source="aws.amazon.com/ec2/pricing/on-demand, unlimited mode",
    as_of=date(2026, 11, 21),
)


# Data sent from EC2 to the internet, the first and dearest 10 TB of a month. Some regions ask more.
TRAFFIC = Price(
    usd=Decimal("0.09"),
    source="aws.amazon.com/ec2/pricing/on-demand, data transfer, us-east-1",
    as_of=date(2026, 11, 21),
)


class AwsSizing:
    """The cheapest instance types that fit, by the catalogue of the account's region."""

    account: Account
    networks: Networks
    spot: bool
    other_regions: tuple[str, ...]
    egress_gb: Decimal
    scarcity: Scarcity | None = Scarcity(
        room="The account's quotas of vCPUs have room",
        remedy="Ask AWS for larger ones (Service Quotas, Amazon EC2), or allow more regions.",
        each_controller=False,
    )

    @cached_property
    def catalogue(self) -> Catalogue:
        """What EC2 sells to the account in its region, and for how much.

        Raises:
            UsageError: the operator's price list is not valid.
        """
        account = self.account
        own = Path(account.settings.prices).expanduser() if account.settings.prices else None
        market, number = account.home.root / "market", account.identity.account
        found = load_catalogue(account.api, account.region, market / f"aws-{number}-{account.region}.json", own)
        return found.of_free_plan if self.is_on_free_plan else found

    @property
    def _free_plan(self) -> Path:
        """The file that notes that EC2 has refused a type because of the account's plan."""
        return self.account.home.root / "market" / f"aws-{self.account.identity.account}-free-plan"

    @property
    def is_on_free_plan(self) -> bool:
        """Whether the account was on the free plan within the last days: an upgrade shows by itself."""
        with contextlib.suppress(OSError):
            return abs(now().timestamp() - self._free_plan.stat().st_mtime) < FREE_PLAN_SECONDS
        return False

    def note_free_plan(self) -> None:
        """Notes that the account is on the free plan: the next commands choose what that includes."""
        self._free_plan.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(self._free_plan, "")

    def choose(self, resources: Resources, aux: VMSpec | None) -> dict[Role, MachineSize]:
        """Chooses the cheapest machines that fit; with spot, the cheapest that the spot market has, if any fit.

        Raises:
            UnavailableError: EC2 sells none that fit, or none with a known price.
        """
        sizes = None
        if self.spot:
            with contextlib.suppress(UnavailableError):
                sizes = choose_machines(resources, aux, self.catalogue.of_spot)
        try:
            sizes = sizes or choose_machines(resources, aux, self.catalogue)
        except UnavailableError as error:
            if not self.is_on_free_plan:
                raise
            said = f"The AWS account is on the free plan. {error.message}"
            raise UnavailableError(said, hint=f"{UPGRADE_HINT} {error.hint}", settings=error.settings) from error
        for group, need in self._needs(sizes).items():
            quotas = [self.quotas.quota(group, market) for market in self._markets]
            known = [quota for quota in quotas if quota is not None]
            # Machines that would not even fit an empty account, unless another region may be tried.
            if len(known) == len(quotas) and max(known) < need and not self.other_regions:
                raise UnavailableError(
                    f"The machines need {need} vCPUs of {group} instances, and the account's quota in "
                    f"{self.account.region} is {max(known)}.",
                    hint=f"{QUOTA_HINT} Or use another region.",
                    settings=("region",),
                )
        return sizes

    @cached_property
    def quotas(self) -> Quotas:
        """The account's quotas of vCPUs in its region."""
        return Quotas(self.account.api, self.account.region, self.catalogue.vcpus)

    @property
    def _markets(self) -> tuple[Market, ...]:
        return ("spot", "on-demand") if self.spot else ("on-demand",)

    def _needs(self, sizes: Mapping[Role, MachineSize]) -> dict[str, int]:
        return vcpu_quota.needs((size.types[0] for size in sizes.values()), self.catalogue.vcpus)

    def _rooms(self, needs: Mapping[str, int]) -> Iterator[tuple[Market, dict[str, Room], int]]:
        """Yields the quotas of each market, and how many environments fit now; not where AWS does not say."""
        for market in self._markets:
            rooms = {group: room for group in needs if (room := self.quotas.room(group, market))}
            if rooms and len(rooms) == len(needs):
                yield market, rooms, min(room.left // needs[group] for group, room in rooms.items())

    def room(self, sizes: Mapping[Role, MachineSize]) -> str:
        """Says how much of the account's quotas the machines take, and how many such environments fit now."""
        parts = []
        needs = self._needs(sizes)
        for market, rooms, fit in self._rooms(needs):
            of = " and ".join(
                f"{needs[group]} of {room.quota} vCPUs ({group}, {room.used} in use)" for group, room in rooms.items()
            )
            parts.append(f"{market}: {of}, room for {fit} such {'environment' if fit == 1 else 'environments'} now")
        return "; ".join(parts)

    def capacity(self, sizes: Mapping[Role, MachineSize]) -> int | None:
        """Returns how many such environments the account's quotas have room for now; None if AWS does not say."""
        fits = [fit for _, _, fit in self._rooms(self._needs(sizes))]
        return sum(fits) if len(fits) == len(self._markets) else None

    def shortage(self, sizes: Mapping[Role, MachineSize], count: int) -> str:
        """Says that the account's quotas have no room for so many more environments, if they have not."""
        fit = self.capacity(sizes)
        if fit is None or fit >= count:
            return ""
        return f"the account's quotas of vCPUs in {self.account.region} have room for {fit} of {count} environments"

    def builder_size(self, base: BaseImage, disk_gib: int) -> MachineSize:
        """Chooses the cheapest builder of the base image's architecture, with room for the distribution's AMI."""
        with contextlib.suppress(ImageBuildError):  # the region has none, which the image's build says
            disk_gib = max(disk_gib, vendor_ami(self.account, base).root_gib)
        return choose_builder(base.architecture, disk_gib, self.catalogue)

    def costs(self, sizes: Mapping[Role, MachineSize], *, has_way_out: bool, spot: bool) -> tuple[CostLine, ...]:
        """Estimates the hourly costs of instances, volumes and public addresses.

        Raises:
            UnavailableError: a price is not known.
        """
        region = self.account.region
        zone = min(self.networks.zones(region)) if spot and self.spot else ""
        prices = self._spot_prices(region, zone, {role: size.types[0] for role, size in sizes.items()})
        return cost_lines(sizes, self.catalogue, has_way_out=has_way_out, spot=prices)

    def egress(self) -> Egress:
        """Returns the bound, and the price in the operator's own list, or else that of us-east-1."""
        price = self.catalogue.prices.get(EGRESS, TRAFFIC)
        return Egress(gb=self.egress_gb, usd_per_gb=price.usd)

    def sent_bytes(self, region: str, launched: Mapping[str, datetime]) -> dict[str, int]:
        """Asks CloudWatch, once a minute for all machines of a region that this process asks about."""
        if not launched:  # one that nobody has
            network_out(self.account.api, region, {"i-00000000000000000": now()})
            return {}
        return meter(self.account.api, region).sent(self.account.api, launched)

    def usd_per_hour(self, environment: Environment) -> Decimal:
        """Returns the cost of the types and the market that the environment got.

        A price that is not known counts as the worst case.
        """
        placement = environment.placement
        sizes = placed({role: machine.size for role, machine in environment.machines.items()}, placement)
        zone = placement["zone"] if placement["market"] == "spot" else ""
        spot = self._spot_prices(placement["region"], zone, {role: placement[role] for role in sizes})
        try:
            lines = cost_lines(sizes, self.catalogue, has_way_out=environment.has_way_out, spot=spot)
        except UnavailableError:
            return environment.worst_usd_per_hour
        return min(hourly(lines), environment.worst_usd_per_hour)

    def _spot_prices(self, region: str, zone: str, types: Mapping[Role, str]) -> dict[Role, Decimal]:
        """The present spot prices by role, as far as AWS says; none without a zone."""
        prices: dict[Role, Decimal] = {}
        for role, instance_type in types.items() if zone else ():
            with contextlib.suppress(ProvisionerError):  # the on-demand price is an upper bound
                if price := spot_price(self.account.api, region, zone, instance_type):
                    prices[role] = price
        return prices


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
            first_hour = CREDITS.usd * catalogue.vcpus[size.types[0]] if BURSTABLE.match(size.types[0]) else Decimal(0)
            lines.append(
                CostLine(
                    what=f"{role}: CPU credits at full load",
                    usd_per_hour=first_hour,
                    worst_usd_per_hour=CREDITS.usd * max(catalogue.vcpus[name] for name in burstable),
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
            hint="May these credentials call pricing:GetProducts? `prices` in the configuration names a list of your "
            "own.",
        )
    return prices[name]


def _same(what: str, usd_per_hour: Decimal, price: Price) -> CostLine:
    return CostLine(
        what=what, usd_per_hour=usd_per_hour, worst_usd_per_hour=usd_per_hour, source=price.source, as_of=price.as_of
    )
